"""Ledgers of several ranks: what differs, who waits for whom, and the words for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.ledger_support import Script, both

from shardproof.ledger import page
from shardproof.ledger.axes import AxisNames
from shardproof.ledger.compare import equal_ends, first_conflict, unequal_ends
from shardproof.ledger.deadlock import find_deadlock, waiting_in
from shardproof.ledger.page import Ledger, State
from shardproof.ledger.words import columns, describe_rank, headline, tails
from shardproof.topology import parse_topology


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"operation": "broadcast"}, "operation"),
        ({"reduce_op": "MAX"}, "reduce op"),
        ({"shapes": "[8]"}, "shape"),
        ({"dtypes": "int32"}, "dtype"),
    ],
)
def test_each_part_of_a_call_is_compared(changed: dict[str, Any], what: str) -> None:
    zero = Script(0).call("all_reduce").call("all_reduce")
    one = Script(1).call("all_reduce").call(**{"operation": "all_reduce", **changed})
    found = first_conflict(both(zero, one))
    assert found is not None
    assert (found.what, found.sequence, found.odd, found.other) == (what, 2, 1, 0)
    assert f"differ at collective #2 in its {what}" in headline(found)
    lines = columns(found)
    assert "rank 0" in lines[0]
    assert "rank 1" in lines[0]
    assert sum(line.startswith(">") for line in lines) == 1
    assert "case.py:2 in test" in "\n".join(lines)
    assert not equal_ends({0: zero.report, 1: one.report})


def test_callers_of_a_helper_are_told() -> None:
    site = "ops.py:3 in add < model.py:8 in step < test_it.py:5 in test_it"
    zero, one = Script(0).call("all_reduce", site=site), Script(1).call("broadcast", site=site)
    ledgers = both(zero, one)
    found = first_conflict(ledgers)
    assert found is not None
    lines = [" ".join(line.split()) for line in columns(found)]
    assert lines[2:] == [
        "at ops.py:3 in add at ops.py:3 in add",
        "called at model.py:8 in step called at model.py:8 in step",
        "called at test_it.py:5 in test_it called at test_it.py:5 in test_it",
    ]
    assert f"at {site}: ended" in "\n".join(tails(ledgers))
    # A headline has no room for them.
    zero.call("barrier")
    found = unequal_ends({0: zero.report, 1: zero.report | {"groups": {}}}, both(zero, Script(1)))
    assert found is not None
    assert headline(found).endswith("which rank 0 called at ops.py:3 in add")


def test_equal_ledgers_have_no_difference() -> None:
    zero, one = (Script(rank).call("all_reduce").call("barrier") for rank in (0, 1))
    assert first_conflict(both(zero, one)) is None
    assert equal_ends({0: zero.report, 1: one.report})
    one.call("barrier")  # not come to it yet
    assert first_conflict(both(zero, one)) is None


def test_the_smaller_party_is_the_odd_one() -> None:
    scripts = [Script(rank, 4).call("barrier" if rank == 2 else "all_reduce") for rank in range(4)]
    found = first_conflict([script.ledger for script in scripts])
    assert found is not None
    assert (found.odd, found.other) == (2, 0)


def test_a_rank_that_called_less_is_named_at_the_end() -> None:
    zero = Script(0).call("all_reduce").call("all_reduce")
    one = Script(1).call("all_reduce")
    found = unequal_ends({0: zero.report, 1: one.report}, both(zero, one))
    assert found is not None
    assert (found.what, found.odd, found.sequence) == ("missing", 1, 2)
    assert "rank 1 never called all_reduce(cp) #2, which rank 0 called at case.py:2" in headline(
        found
    )
    assert "(nothing)" in "\n".join(columns(found))


def test_a_difference_beyond_the_ring_is_still_found() -> None:
    zero = Script(0).call("all_reduce").call("all_reduce")
    one = Script(1).call("broadcast").call("all_reduce")
    ledgers = [Ledger(s.rank, s.entries[1:], {}, 2, 2) for s in (zero, one)]
    found = unequal_ends({0: zero.report, 1: one.report}, ledgers)
    assert found is not None
    assert found.what == "earlier"
    assert "further back than the ledger goes" in headline(found)


def test_waits_that_never_end() -> None:
    """A rank waits in a collective that the other, which has ended its part, never called."""
    zero = Script(0).call("all_reduce", state=State.WAITING)
    one = Script(1)
    assert find_deadlock(both(zero, one), over=set()) is None, "rank 1 may still come"
    found = find_deadlock(both(zero, one), over={1})
    assert found is not None
    assert (found.what, found.odd) == ("missing", 1)


def test_groups_in_another_order_are_a_deadlock() -> None:
    zero = Script(0).call("all_reduce", axis="tp", state=State.WAITING)
    one = Script(1).call("all_reduce", axis="dp", state=State.CALLED)
    found = find_deadlock(both(zero, one), over=set())
    assert found is not None
    assert found.what == "missing"
    assert (found.axis, found.odd) == ("tp", 1)


def test_a_long_transfer_is_no_deadlock() -> None:
    """Rank 0 waits for rank 1, which waits for nobody: its own operation has all its members."""
    zero = Script(0, 3).call("all_reduce", axis="a", ranks="0-1", state=State.WAITING)
    one, two = (
        Script(rank, 3).call("all_reduce", axis="b", ranks="1-2", state=State.WAITING)
        for rank in (1, 2)
    )
    ledgers = [zero.ledger, one.ledger, two.ledger]
    assert find_deadlock(ledgers, over=set()) is None
    assert find_deadlock([zero.ledger, one.ledger, Script(2, 3).ledger], over={2}) is not None


def test_a_wait_in_cpp_counts_where_the_stack_shows_it() -> None:
    zero = Script(0).call("all_reduce", state=State.ISSUED)
    ledgers = both(zero, Script(1))
    assert find_deadlock(ledgers, over={1}) is None
    assert find_deadlock(ledgers, over={1}, inside={0}) is not None


def test_messages_without_a_partner() -> None:
    zero, one = Script(0), Script(1).message("recv", "0", 1, state=State.WAITING)
    found = find_deadlock(both(zero, one), over={0})
    assert found is not None
    assert (found.what, found.odd) == ("message", 0)
    assert "rank 1 called recv(cp) #1 from rank 0" in headline(found)
    assert "rank 0 sent nothing for it" in headline(found)
    sent = Script(0).message("send", "0", 1)
    assert find_deadlock(both(sent, one), over={0}) is None
    lonely = unequal_ends({0: sent.report, 1: Script(1).report}, both(sent, Script(1)))
    assert lonely is not None
    assert "rank 1 received nothing for it" in headline(lonely)
    assert equal_ends({0: sent.report, 1: one.report})


def test_a_receive_from_anybody_takes_any_message() -> None:
    anybody = Script(1).message("recv", "*", 1, state=State.WAITING)
    sent = Script(0).message("send", "0", 1)
    assert equal_ends({0: sent.report, 1: anybody.report})
    assert find_deadlock(both(sent, anybody), over={0}) is None
    found = find_deadlock(both(Script(0), anybody), over={0})
    assert found is not None
    assert found.what == "message"


def test_a_refused_call_takes_no_part() -> None:
    zero = Script(0).call("all_reduce")
    one = Script(1)
    one.call("broadcast", state=State.REFUSED)
    one._next.clear()
    one.call("all_reduce")
    assert first_conflict(both(zero, one)) is None


def test_where_a_rank_waits_in_words() -> None:
    script = Script(0).call("all_reduce").call("all_reduce", state=State.WAITING)
    assert describe_rank(script.ledger) == "waiting in all_reduce(cp) #2 at case.py:2 in test"
    assert waiting_in(Script(1).call("barrier").ledger) is None
    assert "waiting in no collective" in describe_rank(Script(1).call("barrier").ledger)
    assert describe_rank(Ledger(0)) == ""
    assert tails([script.ledger])[-1].endswith(": waiting")


def test_long_parts_of_a_call_fit_a_slot() -> None:
    call = {"group": "g" * 900, "shapes": "[1] " * 500, "site": "x" * 900, "match": 7}
    text = page.encode_call(call)
    assert len(text) <= page.TEXT_LIMIT


def test_a_file_that_is_none_reads_as_nothing(tmp_path: Path) -> None:
    assert page.read_page(tmp_path, 0).entries == []
    page.page_file(tmp_path, 1).write_bytes(b"no ledger")
    assert page.read_page(tmp_path, 1).entries == []
    assert page.changes(page.page_file(tmp_path, 1)) == 0


def test_names_of_groups() -> None:
    names = AxisNames(parse_topology("dp2xtp2xcp2"), 5)
    peers = {axis: parse_topology("dp2xtp2xcp2").peers(5, axis) for axis in ("dp", "tp", "cp")}
    assert {axis: names(ranks) for axis, ranks in peers.items()} == {a: a for a in peers}
    assert names(tuple(range(8))) == "world"
    assert names((4, 5, 6, 7)) == "tp+cp"
    assert names((5,)) == "self"
    assert names((1, 6)) == "ranks 1, 6"
    assert AxisNames(parse_topology("cp2"), 0)((0, 1)) == "cp"
