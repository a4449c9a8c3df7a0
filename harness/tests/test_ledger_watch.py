"""The controller's looks at the ledgers of a run: what it reads, and when it speaks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.ledger_support import Script, both

from shardproof.controller import watch
from shardproof.controller.watch import Watch
from shardproof.ledger.page import Ledger, State

INSIDE = 'Thread 0x1 (most recent call first):\n  File "/x/torch/distributed/ddp.py", line 3 in f\n'
OUTSIDE = 'Thread 0x1 (most recent call first):\n  File "/x/case.py", line 3 in f\n'


class Looks:
    """A watch over scripted ledgers; what it reads and whom it asks is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ledgers: list[Ledger]) -> None:
        self.ledgers = ledgers
        self.changes = 1
        self.read = self.asked = 0
        self.stacks: Mapping[int, str] = {}
        self._watch = Watch(Path("nowhere"), len(ledgers))
        monkeypatch.setattr(watch, "changes", lambda _: self.changes)
        monkeypatch.setattr(watch, "read_all", lambda *_: self._read())

    def _read(self) -> list[Ledger]:
        self.read += 1
        return self.ledgers

    def _ask(self) -> Mapping[int, str]:
        self.asked += 1
        return self.stacks

    def look(self, *over: int) -> str | None:
        found = self._watch.look(over, self._ask)
        return None if found is None else found.what


def test_ledgers_that_change_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, both(Script(0).call("all_reduce"), Script(1).call("broadcast")))
    for _ in range(5):
        looks.changes += 1
        assert looks.look() is None
    assert looks.read == 0
    assert looks.look() == "operation"


def test_a_standstill_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ranks compute between two collectives."""
    looks = Looks(monkeypatch, both(Script(0).call("all_reduce"), Script(1).call("all_reduce")))
    for _ in range(9):
        assert looks.look() is None
    assert looks.read == 1
    looks.changes += 1
    for _ in range(9):
        assert looks.look() is None
    assert looks.read == 2
    assert looks.asked == 0


def test_what_was_written_since_the_last_standstill_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero, one = Script(0).call("all_reduce"), Script(1).call("all_reduce")
    looks = Looks(monkeypatch, both(zero, one))
    assert [looks.look() for _ in range(3)] == [None] * 3
    looks.ledgers = both(zero.call("all_reduce"), one.call("broadcast"))
    looks.changes += 1
    assert [looks.look() for _ in range(2)] == [None, "operation"]


def test_ranks_that_wait_for_one_another_have_a_second_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero = Script(0).call("all_reduce", state=State.WAITING)
    looks = Looks(monkeypatch, both(zero, Script(1)))
    assert [looks.look(1) for _ in range(3)] == [None, None, "missing"]


def test_a_rank_that_ends_its_part_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes nothing more, so the standstill goes on."""
    zero = Script(0).call("all_reduce", state=State.WAITING)
    looks = Looks(monkeypatch, both(zero, Script(1)))
    assert [looks.look() for _ in range(5)] == [None] * 5
    assert looks.look(1) == "missing"


@pytest.mark.parametrize(("stack", "what"), [(INSIDE, "missing"), (OUTSIDE, None)])
def test_waits_in_cpp_are_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, stack: str, what: str | None
) -> None:
    zero = Script(0).call("all_reduce", state=State.ISSUED)
    looks = Looks(monkeypatch, both(zero, Script(1)))
    looks.stacks = {0: stack}
    assert [looks.look(1) for _ in range(3)] == [None, None, what]
    assert [looks.look(1) for _ in range(3)] == [None] * 3
    assert looks.asked == 1


def test_a_wait_in_cpp_for_a_rank_that_ends_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = Script(0).call("all_reduce", state=State.ISSUED)
    looks = Looks(monkeypatch, both(zero, Script(1)))
    looks.stacks = {0: INSIDE, 1: OUTSIDE}
    assert [looks.look() for _ in range(6)] == [None] * 6
    assert looks.asked == 1
    assert looks.look(1) == "missing"
    assert looks.asked == 2
