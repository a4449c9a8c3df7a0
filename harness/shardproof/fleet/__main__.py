"""Entry of the fork server's process: ``python -m shardproof.fleet FD``."""

from __future__ import annotations

import sys

from .server import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
