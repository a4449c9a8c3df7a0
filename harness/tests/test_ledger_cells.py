"""Cells whose ranks say different things to each other: the outcome, the words, and in time."""

from __future__ import annotations

import pytest
from tests.plugin_support import read_run

CASES = """
    import time
    import pytest
    import torch
    import torch.distributed as dist

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group, twice):
            ctx.group, ctx.twice = group, twice
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for _ in range(1 + ctx.twice):
                dist.all_reduce(grad, group=ctx.group)
            return grad, None, None

    def body(what, group, odd, y):
        if what == "operation":
            dist.broadcast(y, 0, group=group) if odd else dist.all_reduce(y, group=group)
        elif what == "reduce_op":
            dist.all_reduce(y, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group)
        elif what == "shape":
            dist.all_reduce(torch.ones(2, 3) if odd else torch.ones(3, 2), group=group)
        elif what == "dtype":
            dtype = torch.int32 if odd else torch.float32
            dist.all_reduce(torch.ones(4, dtype=dtype), group=group)
        elif what == "skip":
            if not odd:
                dist.all_reduce(y, group=group)
        elif what == "backward":
            # The gradient of a plain sum is one number seen four times: no memory to reduce into.
            Scaled.apply(y.requires_grad_(), group, not odd).square().sum().backward()
        elif what == "functional":
            import torch.distributed._functional_collectives as functional
            if not odd:
                functional.all_reduce(y, "sum", group) + 1
        elif what == "receive":
            if odd:
                dist.recv(y, 0)
        elif what == "send":
            if odd:
                dist.isend(y, 0)
        elif what == "sleep":
            if odd:
                time.sleep(1000)
            dist.all_reduce(y, group=group)

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("what", WHATS)
    def test_it(rank, what):
        x = torch.ones(4, dtype=rank.dtype)
        rank.observe("x", x)
        if rank.is_reference:
            return
        group = rank.group("cp")
        dist.all_reduce(x, group=group)
        body(what, group, rank.coordinates["cp"] == 1, torch.ones(4))
"""

WORDS = {
    "operation": "differ at collective #2 in its operation",
    "reduce_op": "differ at collective #2 in its reduce op",
    "shape": "differ at collective #2 in its shape",
    "dtype": "differ at collective #2 in its dtype",
    "skip": "rank 1 never called all_reduce(cp) #2",
    "backward": "rank 1 never called all_reduce(cp) #3",
    "functional": "rank 1 never called all_reduce(cp) #2",
    "receive": "rank 0 sent nothing for it",
    "send": "rank 0 received nothing for it",
}


def test_each_mismatch_is_named_before_the_limit(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CASES.replace("WHATS", repr(list(WORDS))))
    result = pytester.runpytest("--parity-timeout", "1000")
    assert result.ret == 1
    cells = {cell["case"].partition("[")[2][:-1]: cell for cell in read_run(pytester)[1]}
    assert cells.keys() == WORDS.keys()
    for what, words in WORDS.items():
        cell = cells[what]
        assert cell["outcome"] == "mismatched collectives", what
        assert words in cell["message"], what
        assert cell["seconds"] < 900, what  # ended by what the ledgers show, not by the limit
        assert cell["collectives"], what
        assert cell["root"] == (0 if what in ("receive", "send") else 1), what
    assert "in backward" in cells["backward"]["message"]
    for what in ("operation", "skip"):
        assert "rank 0" in cells[what]["message"]
        assert "in body" in cells[what]["message"]


def test_a_hang_shows_where_each_rank_waits(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CASES.replace("WHATS", "['sleep']"))
    pytester.runpytest("--parity-timeout", "15")
    cell = read_run(pytester)[1][0]
    assert (cell["outcome"], cell["root"]) == ("hung", 1)
    assert "waiting in all_reduce(cp) #2 at" in cell["ranks"][0]
    assert "waiting in no collective; last ended all_reduce(cp) #1" in cell["ranks"][1]
    assert "last collectives of rank 0" in cell["message"]


def test_calls_and_bytes_are_in_the_results(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        import torch
        import torch.distributed as dist

        @pytest.mark.parity("cp2", "dp2xcp2")
        def test_it(rank):
            x = torch.ones(4, dtype=torch.float64)
            rank.observe("x", x)
            if not rank.is_reference:
                dist.all_reduce(x.clone(), group=rank.group("cp"))
                dist.all_reduce(x.clone(), group=rank.group("cp"))
                dist.barrier()
        """
    )
    result = pytester.runpytest("--parity-timeout", "100")
    result.assert_outcomes(passed=2)
    two, four = (cell["collectives"] for cell in read_run(pytester)[1])
    reduced = {"axis": "cp", "operation": "all_reduce", "backward": 0}
    assert two[0] == {**reduced, "calls": 4, "bytes": 4 * 32}
    assert two[1]["operation"] == "barrier"
    assert four[0] == {**reduced, "calls": 8, "bytes": 8 * 32}
    assert (four[1]["axis"], four[1]["calls"]) == ("world", 4)


def test_without_the_ledger_nothing_is_recorded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CASES.replace("WHATS", "['reduce_op', 'send']"))
    result = pytester.runpytest("--parity-timeout", "100", "--parity-ledger", "off")
    result.assert_outcomes(passed=2)
    assert all("collectives" not in cell for cell in read_run(pytester)[1])
