"""What ranks keep from case to case, and what they must not."""

from __future__ import annotations

import pytest
from tests.plugin_support import LAYER, read_run


def test_state_of_a_case_ends_with_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        LAYER
        + """
    @pytest.mark.parity("cp2")
    def test_changes_everything(rank):
        os.environ["LEAK"] = "1"
        os.chdir("/")
        torch.set_default_dtype(torch.float16)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(2)
        torch.set_default_device("meta")
        sys.path.append("/leak")
        if not rank.is_reference:
            dist.new_group([0, 1])
        rank.observe("x", 1.5)

    @pytest.mark.parity("cp2")
    def test_finds_it_clean(rank):
        assert "LEAK" not in os.environ
        assert os.getcwd() != "/"
        assert torch.get_default_dtype() is torch.float64
        assert torch.is_grad_enabled()
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 1
        assert torch.ones(1).device.type == "cpu"
        assert "/leak" not in sys.path
        rank.observe("random", torch.rand(3))
        groups = dist.distributed_c10d._world.pg_map
        assert len(groups) <= 3
    """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=2)


def test_groups_are_kept_only_while_provably_clean(pytester: pytest.Pytester) -> None:
    """An orphan send must not reach a later case; an unequal count of operations neither."""
    pytester.makepyfile(
        LAYER
        + """
    SEEN = []

    def world(rank, name):
        if not rank.is_reference:
            SEEN.append(dist.group.WORLD)
        rank.observe(name, torch.ones(2))

    @pytest.mark.parity("cp2")
    def test_1_first(rank):
        world(rank, "x")

    @pytest.mark.parity("cp2")
    def test_2_kept(rank):
        world(rank, "x")
        assert rank.is_reference or SEEN[-1] is SEEN[-2]
        if rank.coordinates["cp"] == 0 and not rank.is_reference:
            dist.isend(torch.full((2,), 666.0), 1)

    @pytest.mark.parity("cp2")
    def test_3_new_after_an_orphan_send(rank):
        world(rank, "x")
        assert rank.is_reference or SEEN[-1] is not SEEN[-2]
        if not rank.is_reference:
            value = torch.zeros(2)
            if rank.coordinates["cp"] == 0:
                dist.send(torch.ones(2), 1)
            else:
                dist.recv(value, 0)
                assert value[0] == 1

    @pytest.mark.parity("cp2")
    def test_4_new_after_point_to_point(rank):
        world(rank, "x")
        assert rank.is_reference or SEEN[-1] is not SEEN[-2]
        if not rank.is_reference:
            dist.destroy_process_group()

    @pytest.mark.parity("cp2")
    def test_5_new_after_destruction(rank):
        world(rank, "x")
        if not rank.is_reference:
            dist.all_reduce(torch.ones(1))
    """
    )
    result = pytester.runpytest()
    # What was sent and never received is a mismatch, also where every value is right.
    result.assert_outcomes(passed=4, failed=1)
    orphan = read_run(pytester)[1][1]
    assert orphan["outcome"] == "mismatched collectives"
    assert "rank 0 called send(" in orphan["message"]
    assert "rank 1 received nothing for it" in orphan["message"]
    # Without the ledger it is no failure, and its groups are no more kept than with it.
    result = pytester.runpytest("--parity-ledger", "off")
    result.assert_outcomes(passed=5)


def test_groups_that_saw_different_collectives_are_not_kept(pytester: pytest.Pytester) -> None:
    """As many operations on each rank, and equal values: only the reduce operations differ."""
    pytester.makepyfile(
        LAYER
        + """
    SEEN = []

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_it(rank, n):
        rank.observe("x", torch.ones(2))
        if rank.is_reference:
            return
        SEEN.append(dist.group.WORLD)
        assert n == 1 or (SEEN[-1] is SEEN[-2]) == (n == 2)
        odd = n == 2 and rank.coordinates["cp"] == 1
        dist.all_reduce(torch.zeros(1), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    """
    )
    pytester.runpytest().assert_outcomes(passed=2, failed=1)
    found = [cell["outcome"] for cell in read_run(pytester)[1]]
    assert found == ["passed", "mismatched collectives", "passed"]


def test_preload_that_raises_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        broken_preload="raise ImportError('libnothing.so is missing')",
        test_it="""
            import pytest

            @pytest.mark.parity("cp2")
            def test_it(rank): ...
            """,
    )
    pytester.syspathinsert()
    result = pytester.runpytest("-o", "shardproof_preload=broken_preload")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stdout.str() + result.stderr.str()
    assert "broken_preload" in text
    assert "libnothing.so is missing" in text


def test_a_preload_that_starts_threads_is_left_to_the_ranks(pytester: pytest.Pytester) -> None:
    """A process with threads can't be forked safely, and some libraries start one on import."""
    pytester.makepyfile(
        threaded_preload="""
            import threading, time

            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
            """,
        test_it="""
            import pytest
            import threaded_preload

            @pytest.mark.parity("cp2")
            def test_it(rank):
                rank.observe("x", 1)
            """,
    )
    pytester.syspathinsert()
    result = pytester.runpytest("-o", "shardproof_preload=threaded_preload")
    result.assert_outcomes(passed=1, warnings=1)
    assert "threaded_preload starts threads when it is imported" in result.stdout.str()


def test_fresh_ranks_for_every_case(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        LAYER
        + """
    SEEN = []

    @pytest.fixture(scope="session")
    def broken_end():
        yield
        raise RuntimeError("session fixture fails at its end")

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("n", [1, 2])
    def test_n(rank, n):
        SEEN.append(n)
        assert rank.is_reference or SEEN == [n]
        rank.observe("n", n)

    @pytest.mark.parity("cp2")
    def test_end(rank, broken_end):
        rank.observe("n", 1)
    """
    )
    result = pytester.runpytest("--parity-fresh")
    result.assert_outcomes(passed=3, errors=1)
    assert "session fixture fails at its end" in result.stdout.str()


@pytest.mark.parametrize("by", ["option", "ini"])
def test_xdist_workers_have_fleets_of_their_own(pytester: pytest.Pytester, by: str) -> None:
    """Ranks get the same options and ini as their worker, and must not distribute themselves."""
    pytester.mkpydir("plain")
    (pytester.path / "plain/test_plain.py").write_text(
        "def test_plain(tmp_path):\n    assert tmp_path.exists()\n", encoding="utf-8"
    )
    pytester.makepyfile(
        LAYER
        + """
    @pytest.mark.parity("cp2", "single")
    @pytest.mark.parametrize("n", range(3))
    def test_n(rank, n):
        rank.observe("n", torch.ones(4) * (n + 1))
        assert n < 2 or rank.is_reference
    """
    )
    if by == "ini":
        pytester.makeini("[pytest]\naddopts = -n 1\n")
    result = pytester.runpytest_subprocess(*(["-n", "2"] if by == "option" else []))
    result.assert_outcomes(passed=5, failed=2)
    header, cells = read_run(pytester)
    assert len(cells) == 6
    assert header["schema"] == 1
    result.stdout.fnmatch_lines(["*shardproof*", "*4 of 6 cells passed*"])
