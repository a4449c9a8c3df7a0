"""Ledgers of ranks, written call by call."""

from __future__ import annotations

import zlib
from typing import Any

from shardproof.ledger.page import Entry, Ledger, State


class Script:
    """The ledger of one rank, written call by call."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank = rank
        self.everyone = "-".join(map(str, range(size)))
        self.entries: list[Entry] = []
        self._next: dict[str, tuple[int, int]] = {}

    def call(
        self,
        operation: str,
        *,
        axis: str = "cp",
        ranks: str | None = None,
        state: State = State.ENDED,
        shapes: str = "[4]",
        reduce_op: str = "SUM",
        dtypes: str = "float32",
        **more: Any,
    ) -> Script:
        group = f"{axis}@{ranks or self.everyone}"
        text = f"{operation}{shapes}{reduce_op}{dtypes}"
        line = more.get("channel", group) + more.get("direction", "")
        sequence, chain = self._next.get(line, (0, 0))
        match = zlib.crc32(("" if "channel" in more else text).encode())
        chain = zlib.crc32(match.to_bytes(8, "little"), chain)
        self._next[line] = sequence + 1, chain
        call = {
            "group": group, "axis": axis, "operation": operation, "reduce_op": reduce_op,
            "shapes": shapes, "dtypes": dtypes, "bytes": 16, "backward": False,
            "site": f"case.py:{len(self.entries) + 1} in test", "match": match, **more,
        }  # fmt: skip
        number = len(self.entries) + 1
        self.entries.append(
            Entry(number, sequence + 1, number + self.rank / 10, None, chain, state, call)
        )
        return self

    def message(self, direction: str, source: str, target: int, **more: Any) -> Script:
        operation = "send" if direction == "send" else "recv"
        channel = f"cp@{self.everyone}|{source}>{target}|0"
        return self.call(operation, channel=channel, direction=direction, **more)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.rank, self.entries, {}, len(self.entries), len(self.entries))

    @property
    def report(self) -> dict[str, Any]:
        groups = {k: list(v) for k, v in self._next.items() if "|" not in k}
        channels: dict[str, dict[str, list[int]]] = {}
        for entry in self.entries:
            if entry.channel:
                line = self._next[entry.channel + entry.call["direction"]]
                channels.setdefault(entry.channel, {})[entry.call["direction"]] = list(line)
        return {"groups": groups, "channels": channels}


def both(zero: Script, one: Script) -> list[Ledger]:
    return [zero.ledger, one.ledger]
