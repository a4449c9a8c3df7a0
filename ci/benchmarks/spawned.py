"""The trivial case under plain torch.multiprocessing.spawn, with a new process group each time.

spawned.py RANKS CASES    prints a JSON list: seconds of each case
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import torch.multiprocessing
from collective import fresh_store, in_new_group


def main() -> None:
    """Run the cases one after the other."""
    size, cases = int(sys.argv[1]), int(sys.argv[2])
    seconds = []
    with tempfile.TemporaryDirectory(prefix="shardproof-benchmark-") as folder:
        for _ in range(cases):
            started = time.perf_counter()
            torch.multiprocessing.spawn(in_new_group, args=(size, fresh_store(folder)), nprocs=size)
            seconds.append(time.perf_counter() - started)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
