"""A controller to be killed by tests: forks ranks, says so, and ends in the way it is told.

Arguments: the root of its scratch directory, the entry of its ranks, what to preload (names with
commas), and how to end. Prints a line of JSON when all is running.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.fleet_support import messages

from shardproof.fleet import ForkServer, make_scratch


def main(root: str, entry: str, preload: str, how: str) -> None:
    """Run the scenario."""
    scratch = make_scratch(root=Path(root))
    server = ForkServer(preload=[name for name in preload.split(",") if name], scratch=scratch)
    if how == "die while importing":
        sys.stdout.write(json.dumps({"scratch": str(scratch)}) + "\n")
        sys.stdout.flush()
    fleet = server.fork(
        size=2,
        entry=f"tests.fleet_support:{entry}",
        setup={"store": str(scratch / "store"), "how": "stay", "root": root},
        label="x",
    )
    first = messages(fleet, 2)
    (scratch / "reference.bin").write_bytes(b"x" * 4096)
    told = {
        "token": server.token,
        "server": server.pid,
        "ranks": {rank.index: rank.pid for rank in fleet.ranks},
        "scratch": str(scratch),
        "messages": [message.payload for message in first],
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    match how:
        case "return":
            return
        case "raise":
            raise RuntimeError("as a test wants it")
        case "os._exit":
            os._exit(3)
        case "poll":
            while fleet.live:
                fleet.poll(None)
            sys.stdout.write(json.dumps([str(end) for end in fleet.exits.values()]) + "\n")
        case _:
            while True:
                signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
