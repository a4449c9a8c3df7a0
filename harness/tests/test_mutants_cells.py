"""Mutants at work: what they change, what notices it, and what does not count as noticed."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

import pytest
from tests.plugin_support import read_run

from shardproof.mutants import campaign
from shardproof.mutants.target import ELEMENT, KINDS, OTHER_REDUCTION, REHEARSED, ROUNDED

# Every operation once, all of which is observed. Values differ in every place and on every rank.
ALL = """
    import pytest
    import torch
    import torch.distributed as dist

    def own(rank, count, at=None):
        at = rank.coordinates["cp"] if at is None else at
        return torch.arange(1.0, count + 1, dtype=rank.dtype).mul(1.37 + at).sin() + 3 + at

    def all_of(rank, count):
        return [own(rank, count, at) for at in range(2)]

    def _all_reduce(rank, x, group):
        dist.all_reduce(x, group=group)
        return x

    def _maximum(rank, x, group):
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
        return x

    def _broadcast(rank, x, group):
        dist.broadcast(x, group=group, group_src=1)
        return x

    def _all_gather(rank, x, group):
        found = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(found, x, group=group)
        return torch.stack(found)

    def _into_tensor(rank, x, group):
        found = x.new_empty(2 * len(x))
        dist.all_gather_into_tensor(found, x, group=group)
        return found

    def _exchange(rank, x, group):
        mine, found = x.repeat(2), x.new_empty(2 * len(x))
        dist.all_to_all_single(found, mine, group=group)
        return found

    def _reduce_scatter(rank, x, group):
        found = torch.empty_like(x)
        dist.reduce_scatter_tensor(found, torch.cat([x, x * 2]), group=group)
        # Ranks may add up in another order each.
        every = x.new_empty(2 * len(x))
        dist.all_gather_into_tensor(every, found, group=group)
        return every

    def _async(rank, x, group):
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        return x

    def _functional(rank, x, group):
        import torch.distributed._functional_collectives as functional
        return functional.all_reduce(x, "sum", group) + 0

    def _scatter(rank, x, group):
        found = torch.empty_like(x)
        mine = [part * factor() for part in all_of(rank, len(x))]
        mine = mine if rank.coordinates["cp"] == 0 else None
        dist.scatter(found, mine, group=group, group_src=0)
        every = x.new_empty(2 * len(x))
        dist.all_gather_into_tensor(every, found, group=group)
        return every

    CALLS = [_all_reduce, _maximum, _broadcast, _all_gather, _into_tensor, _exchange,
             _reduce_scatter, _async, _functional, _scatter]

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("call", CALLS)
    def test_all(rank, call):
        # Twice, with other values: what is one call old is wrong.
        for count in (6, 6):
            CALLED[0] += 1
            if rank.is_reference:
                value = WANTED[call.__name__]([part * factor() for part in all_of(rank, count)])
            else:
                value = call(rank, own(rank, count) * factor(), rank.group("cp"))
            rank.observe(f"value{CALLED[0]}", value)

    CALLED = [0]

    def factor():
        return 1 + CALLED[0] % 2

    @pytest.fixture(autouse=True)
    def count():
        CALLED[0] = 0

    WANTED = {
        "_all_reduce": sum,
        "_maximum": lambda parts: torch.stack(parts).amax(0),
        "_broadcast": lambda parts: parts[1],
        "_all_gather": torch.stack,
        "_into_tensor": torch.cat,
        "_exchange": torch.cat,
        "_reduce_scatter": lambda parts: torch.cat([sum(parts) * n for n in (1, 2)]),
        "_async": sum,
        "_functional": sum,
        "_scatter": torch.cat,
    }
"""


def trials_of(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [trial for cell in cells for trial in cell["mutants"]]


def test_every_mutant_of_what_is_observed_is_killed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ALL)
    result = pytester.runpytest("--mutants", "all")
    result.assert_outcomes(passed=10)
    _, cells = read_run(pytester)
    trials = trials_of(cells)
    results = {(trial["operation"], trial["kind"]): trial["result"] for trial in trials}
    assert set(results.values()) == {"killed"}, [t for t in trials if t["result"] != "killed"]
    world = "over the whole world"
    assert {trial["kind"] for trial in trials} == set(KINDS) - {world}
    assert {trial["operation"] for trial in trials} == {
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "all_to_all_single",
        "reduce_scatter_tensor",
        "scatter",
    }
    assert result.ret == 0
    result.stdout.fnmatch_lines(["all  *", "*mutants that change a number are killed (100.0 %)*"])
    for trial in trials:
        assert trial["changed"] > 0
        assert trial["by"]


OTHERS = """
    import os
    import pytest
    import torch
    import torch.distributed as dist

    def _reduced(rank, x):
        if not rank.is_reference:
            dist.all_reduce(x, group=rank.group("cp"))
        return x

    def unobserved(rank, x):
        _reduced(rank, x)

    def observed(rank, x):
        rank.observe("value", _reduced(rank, x if rank.is_reference else x / 2))

    def zero(rank, x):
        rank.observe("zero", _reduced(rank, x * 0), zero=True)

    def asserted(rank, x):
        value = _reduced(rank, x / (1 if rank.is_reference else 2))
        assert torch.allclose(value, x), "not the sum"

    def refusing(rank, x):
        value = _reduced(rank, x / (1 if rank.is_reference else 2))
        if not torch.allclose(value, x):
            raise ValueError("not the sum")

    def crashing(rank, x):
        value = _reduced(rank, x / (1 if rank.is_reference else 2))
        if not torch.allclose(value, x):
            os._exit(3)

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("call", [unobserved, observed, zero, asserted, refusing, crashing])
    def test_it(rank, call):
        x = torch.arange(1.0, 5.0, dtype=rank.dtype)
        rank.observe("x", x)
        call(rank, x.clone())
"""


def test_what_mutants_come_to(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OTHERS)
    run = pytester.runpytest("--mutants", "multiplied")
    _, cells = read_run(pytester)
    assert {cell["outcome"] for cell in cells} == {"passed"}
    trials = {cell["case"].rpartition("[")[2]: cell["mutants"][0] for cell in cells}
    # A helper is told apart by who called it, else the first that is killed would speak for all.
    assert {name: trial["result"] for name, trial in trials.items()} == {
        "unobserved]": "survived",
        "observed]": "killed",
        "zero]": "equivalent",
        "asserted]": "killed",
        "refusing]": "refused",
        "crashing]": "not judged",
    }
    assert trials["zero]"]["changed"] == 0 < trials["zero]"]["calls"]
    assert trials["observed]"]["by"] == ["value"]
    for name in ("asserted]", "refusing]"):
        assert "not the sum" in trials[name]["by"][0]
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(
        [
            "2 of 5 mutants that change a number are killed (40.0 %), 1 more refused (60.0 %)*",
            "survived*in unobserved*no case that was tried observes what changes here*",
            "1 survived without a reason: *shardproof_survivors*",
            "the run fails by its mutants*",
        ]
    )


HANGING = """
    import time
    from pathlib import Path

    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.parity("cp2")
    def test_it(rank):
        x = torch.arange(1.0, 5.0, dtype=rank.dtype)
        value = 2 * x
        if not rank.is_reference:
            runs = Path(__file__).with_name(f"runs{rank.index}")
            with runs.open("a") as file:
                file.write("x")
            value = x.clone()
            dist.all_reduce(value, group=rank.group("cp"))
            if {condition}:
                time.sleep(1000)
        rank.observe("x", value)
"""


@pytest.mark.parametrize(
    ("condition", "what"),
    [
        ("not torch.equal(value, 2 * x)", "with the mutant"),
        ("len(runs.read_text()) > 2", "on untouched ranks without a mutant"),
    ],
)
def test_a_mutant_that_hangs_is_stopped_by_its_own_limit(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, condition: str, what: str
) -> None:
    monkeypatch.setattr(campaign, "LIMIT_LEAST", 1.5)
    pytester.makepyfile(HANGING.replace("{condition}", condition))
    run = pytester.runpytest("--mutants", "dropped")
    _, (cell,) = read_run(pytester)
    assert cell["outcome"] == "passed"
    (trial,) = cell["mutants"]
    assert trial["result"] == "not judged"
    (said,) = trial["by"]
    assert fnmatchcase(said, f"*rank ? did not end within ?.? s {what}; expected at most 5 times *")
    assert "--parity-timeout" not in said
    assert run.ret == pytest.ExitCode.TESTS_FAILED


def test_what_changes_no_bit_needs_no_run_of_its_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OTHERS)
    pytester.runpytest("--mutants", "all", "-k", "cp2-zero or cp2-observed")
    trials = {
        (cell["case"].rpartition("[")[2], trial["kind"]): trial
        for cell in read_run(pytester)[1]
        for trial in cell["mutants"]
    }
    idle = {key for key, trial in trials.items() if trial["result"] == "equivalent"}
    # A sum of zeros is zero, whatever is done with it, but for an element that is set.
    assert {kind for case, kind in idle if case == "zero]"} == {
        kind for case, kind in trials if case == "zero]" and kind != ELEMENT
    }
    assert {case for case, _ in trials} == {"zero]", "observed]"}
    # Whole numbers as small as these are as they were, rounded.
    assert {kind for case, kind in idle if case == "observed]"} == {ROUNDED}
    for key, trial in trials.items():
        without_a_run = key in idle and key[1] in REHEARSED
        assert (trial["seconds"] == 0) == without_a_run, key
        assert trial["calls"] == 2
    assert ("zero]", OTHER_REDUCTION) in idle


def test_a_survivor_with_a_reason_passes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OTHERS)
    pytester.makeini("[pytest]\nshardproof_survivors = survivors.txt")
    pytester.path.joinpath("survivors.txt").write_text("reported | dropped: *unobserved*\n")
    run = pytester.runpytest("--mutants", "dropped", "-k", "observed")
    assert run.ret == 0
    run.stdout.fnmatch_lines(["survived*what comes of it is shown to people alone*"])
    pytester.path.joinpath("survivors.txt").write_text("somehow | dropped: *\n")
    run = pytester.runpytest("--mutants", "dropped")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines(["*shardproof_survivors: *expected 'reason | name of a mutant'*"])


UNTOUCHED = """
    import os
    import pytest
    import torch
    import torch.distributed as dist

    KEPT = []

    def step(rank, x, name):
        unseen = x.clone()
        if not rank.is_reference:
            dist.all_reduce(unseen, group=rank.group("cp"))
        rank.observe(name, x)

    def values(rank):
        return torch.arange(1.0, 5.0, dtype=rank.dtype) / 3

    @pytest.mark.parity("cp2")
    def test_first(rank):
        KEPT.append(1)
        rank.observe("x", values(rank))

    @pytest.mark.parity("cp2")
    def test_state_of_another_case(rank):
        step(rank, values(rank) * (rank.is_reference or len(KEPT)), "state")

    @pytest.mark.parity("cp2", "dp2")
    def test_files(rank):
        # On the first topology it saves, on the next it loads.
        path = rank.case_dir / f"x{rank.index}.pt"
        x = values(rank)
        if not rank.is_reference:
            assert path.exists() == (rank.topology.name == "dp2")
            torch.save(x, path)
        if rank.topology.name == "dp2":
            rank.observe("x", x)
        else:
            step(rank, x, "x")

    @pytest.mark.parity("cp2")
    def test_elsewhere(rank, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        step(rank, values(rank), "x")
"""


def test_what_is_not_the_mutants_is_not_put_down_to_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(UNTOUCHED)
    run = pytester.runpytest("--mutants", "dropped")
    _, cells = read_run(pytester)
    ended = [(cell["case"].partition("::")[2], cell["outcome"]) for cell in cells]
    # The first calls nothing, so that nothing can be tried there.
    assert [name for name, outcome in ended if outcome != "passed"] == ["test_first"]
    trials = {cell["case"].partition("::")[2]: cell["mutants"] for cell in cells if cell["mutants"]}
    results = {name: [one["result"] for one in found] for name, found in trials.items()}
    assert results == {
        "test_state_of_another_case": ["not judged"],
        "test_files": ["survived"],
        "test_elsewhere": ["survived"],
    }
    (said,) = trials["test_state_of_another_case"][0]["by"]
    assert said.startswith("the case fails on untouched ranks without a mutant")
    for found in trials.values():
        assert all(one["site"].startswith("test_what_is_not") for one in found)
    assert run.ret == pytest.ExitCode.TESTS_FAILED


def test_ranks_that_do_not_start_cost_the_mutants_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(UNTOUCHED)
    pytester.makeconftest(
        """
        import os
        from pathlib import Path

        if "RANK" in os.environ:
            mark = Path(__file__).with_name("started" + os.environ["RANK"])
            if os.environ["WORLD_SIZE"] == "2":
                assert not mark.exists(), "no second time"
                mark.touch()
        """
    )
    run = pytester.runpytest("--mutants", "dropped", "-k", "elsewhere")
    _, (cell,) = read_run(pytester)
    assert cell["outcome"] == "passed"
    assert [trial["result"] for trial in cell["mutants"]] == ["not judged"]
    assert (
        "no second time" in cell["mutants"][0]["by"][0]
        or "untouched2" in (cell["mutants"][0]["by"][0])
    )
    assert run.ret == pytest.ExitCode.TESTS_FAILED


def test_what_no_case_calls_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        trainer="""
        import torch.distributed as dist

        def step(x, group):
            dist.all_reduce(x, group=group)
            return x

        def norm(x, group):
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
        """,
        test_it="""
        import pytest
        import torch
        import torch.distributed as dist
        import trainer

        @pytest.mark.parity("cp2")
        def test_it(rank):
            x = torch.arange(1.0, 5.0, dtype=rank.dtype)
            if not rank.is_reference:
                # A collective of the case's own is none of the trainer's.
                dist.all_reduce(x.clone(), group=rank.group("cp"))
            x = 2 * x if rank.is_reference else trainer.step(x, rank.group("cp"))
            rank.observe("x", x)
        """,
    )
    pytester.makeini("[pytest]\npythonpath = .\nshardproof_subject = trainer.py")
    run = pytester.runpytest("--mutants", "dropped")
    assert run.ret == 0
    _, (cell,) = read_run(pytester)
    (trial,) = cell["mutants"]
    assert trial["site"].startswith("trainer.py:4 in step < test_it.py:")
    assert [site.partition(":")[0] for site in cell["call_sites"]] == ["test_it.py", "trainer.py"]
    run.stdout.fnmatch_lines(
        [
            "collective coverage of trainer.py: 1 of 2 call sites reached, 1 with a killed mutant",
            "not reached: all_reduce at trainer.py:8 in norm",
        ]
    )
    pytester.makeini("[pytest]\npythonpath = .\nshardproof_subject = nowhere")
    run = pytester.runpytest("--mutants", "dropped")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines(["*shardproof_subject: *nowhere*"])


@pytest.mark.parametrize("start", ["tests", ".."])
def test_names_do_not_say_where_pytest_was_started(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    pytester.makepyfile(
        **{
            "trainer": """
            import torch.distributed as dist

            def step(x, group):
                dist.all_reduce(x, group=group)
                return x
            """,
            "tests/test_it": """
            import pytest
            import torch
            import torch.distributed as dist
            import trainer

            @pytest.mark.parity("cp2")
            def test_it(rank):
                x = torch.arange(1.0, 5.0, dtype=rank.dtype)
                if not rank.is_reference:
                    # A collective of the case's own is none of the trainer's.
                    dist.all_reduce(x.clone(), group=rank.group("cp"))
                x = 2 * x if rank.is_reference else trainer.step(x, rank.group("cp"))
                rank.observe("x", x)
            """,
        }
    )
    pytester.makeini("[pytest]\npythonpath = .\nshardproof_subject = trainer.py")
    root = pytester.path
    monkeypatch.chdir(root / start)
    where = ["--rootdir", str(root), "-c", str(root / "tox.ini"), str(root / "tests")]
    run = pytester.runpytest("--mutants", "dropped", *where, "--parity-report", str(root / "said"))
    assert run.ret == 0
    lines = (root / "said/run.jsonl").read_text("utf-8").splitlines()
    (trial,) = json.loads(lines[1])["mutants"]
    assert trial["mutant"] == "dropped: all_reduce over cp (forward) trainer.py in step"
    assert trial["site"] == "trainer.py:4 in step"
    run.stdout.fnmatch_lines(
        ["collective coverage of trainer.py: 1 of 1 call sites reached, 1 with a killed mutant"]
    )


LEFT_BEHIND = """
    import pytest
    import torch
    import torch.distributed as dist

    KEPT = {}

    def step(rank, x):
        a, b = x.clone(), x.clone()
        if not rank.is_reference:
            dist.all_reduce(a, group=rank.group("cp"))
            dist.all_reduce(b, group=rank.group("cp"))
        return a if not rank.is_reference else 2 * x, b

    @pytest.mark.parity("cp2")
    def test_it(rank):
        x = torch.arange(1.0, 5.0, dtype=rank.dtype)
        # What the run before left is observed, and only one of the two sums.
        rank.observe("before", KEPT.get("b", x * 2))
        a, b = step(rank, x)
        rank.observe("a", a)
        KEPT["b"] = x * 2 if rank.is_reference else b
"""


def test_nothing_is_left_behind_and_every_line_is_tried(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(LEFT_BEHIND)
    run = pytester.runpytest("--mutants", "dropped")
    _, (cell,) = read_run(pytester)
    assert cell["outcome"] == "passed"
    assert [trial["result"] for trial in cell["mutants"]] == ["killed", "survived"]
    lines = {trial["site"].partition(" in ")[0] for trial in cell["mutants"]}
    assert len(lines) == 2
    assert run.ret == pytest.ExitCode.TESTS_FAILED


def test_a_root_is_where_its_element_is_wrong(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        import torch
        import torch.distributed as dist

        @pytest.mark.parity("cp2")
        def test_it(rank):
            x = torch.arange(1.0, 5.0, dtype=rank.dtype)
            if rank.is_reference:
                x = 2 * x
            else:
                dist.reduce(x, 0, group=rank.group("cp"))
            rank.observe("x", x, on={"cp": 0})
        """
    )
    run = pytester.runpytest("--mutants", "one element", "--parity-fresh")
    _, (cell,) = read_run(pytester)
    assert [trial["result"] for trial in cell["mutants"]] == ["killed"]
    assert run.ret == 0


@pytest.mark.parametrize("option", [["--parity-ledger", "off"], ["--against", "HEAD"]])
def test_what_can_not_go_with_mutants_is_refused(
    pytester: pytest.Pytester, option: list[str]
) -> None:
    run = pytester.runpytest("--mutants", "all", *option)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines([f"*--mutants can't be used with {option[0]}*"])


def test_a_choice_that_is_none_is_refused_before_anything_runs(pytester: pytest.Pytester) -> None:
    run = pytester.runpytest("--mutants", "sample")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines(["*--mutants: expected all, sample:SEED*got 'sample'*"])
