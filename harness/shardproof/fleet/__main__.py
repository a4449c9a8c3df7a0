"""Entry of the fork server's process: python -m shardproof.fleet FD PID START SCRATCH.

FD is the control socket, PID and START (clock ticks) say which process is the controller.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .processes import Ident
from .server import main

if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        controller=Ident(int(sys.argv[2]), int(sys.argv[3])),
        scratch=Path(sys.argv[4]),
    )
