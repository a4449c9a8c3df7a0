"""Which call sites a run reached, of those that were found by reading."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.mutants_support import OPS, Write, found_in

from shardproof.ledger.sites import CALLERS, Sites
from shardproof.mutants.coverage import Coverage, covered, frames_of, hit_by, lines_of
from shardproof.mutants.reading import CallSite, read_sites


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)
    return partial(found_in, tmp_path)


RUN = """\
import contextlib
from functools import partial

import torch.distributed as dist
from torch.distributed import broadcast


def add(x):
    return _in_place(x, lambda y: dist.all_reduce(y))


def _in_place(x, call):
    call(x)
    return x


def share(x):
    _in_place(
        x,
        partial(broadcast, src=0),
    )


def never(x):
    dist.barrier()


def hidden(x, name):
    getattr(dist, name)(x)


def step(x):
    add(add(x)), share(x)
    dist.all_gather(
        [],
        x,
    )
    [dist.reduce(y, 0) for y in x]
    hidden(x, "gather")
"""


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the ledger calls the call sites of RUN, in the order in which they are called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/code.py").write_text(RUN)
    said: list[str] = []
    sites = Sites()

    def operation(*_args: Any, **_options: Any) -> None:
        path = sites.path(sys._getframe(1), CALLERS)
        here = str(tmp_path / "mine")
        inside = [one for one in path if one[0].co_filename.startswith(here)]
        said.append(sites.path_text(tuple(inside)))

    for name in ("all_reduce", "broadcast", "all_gather", "reduce", "gather", "barrier"):
        monkeypatch.setattr(dist, name, operation)
    spec = importlib.util.spec_from_file_location("code_of_run", tmp_path / "mine/code.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.step([1.0])
    return said


def test_what_a_run_reaches_and_what_it_does_not(texts: list[str]) -> None:
    assert len(texts) == 6
    result = Coverage(["mine"])
    for text in texts:
        result.see(text)
    result.kill(texts[0])
    result.see("a thread without user code")
    result.see("cases/test_it.py:7 in test_it")
    assert result.lines() == [
        "collective coverage of mine: 6 of 7 call sites reached, 2 with a killed mutant",
        "not reached: barrier at mine/code.py:25 in never",
        (
            "not found by reading: mine/code.py:29 in hidden: a library communicates there, or an "
            "operation is called by a name that only the run knows"
        ),
    ]
    record = json.loads(json.dumps(result.record()))
    assert record["subject"] == ["mine"]
    assert record["unread"] == [{"file": "mine/code.py", "line": 29, "function": "hidden"}]
    (barrier,) = (one for one in record["sites"] if not one["reached"])
    assert (barrier["name"], barrier["killed"], barrier["counted"]) == ("barrier", False, True)


@pytest.mark.parametrize(
    ("left_out", "names"),
    [
        ((0, 1), ["add", "all_reduce", "barrier"]),
        ((2,), ["barrier", "broadcast", "share"]),
        ((3,), ["all_gather", "barrier"]),
        ((4,), ["barrier", "reduce"]),
    ],
)
def test_each_call_site_that_is_not_reached_is_named(
    texts: list[str], left_out: tuple[int, ...], names: list[str]
) -> None:
    kept = [text for at, text in enumerate(texts) if at not in left_out]
    result = covered(["mine"], read_sites(["mine"]), kept)
    assert sorted(site.name for site in result.missing) == names
    lines = lines_of(result)
    assert all(f"not reached: {site}" in lines for site in result.missing)


def test_each_call_site_that_reading_misses_is_named(texts: list[str]) -> None:
    sites = read_sites(["mine"])
    for text in texts[:5]:
        (read_there,) = [site for site in hit_by(text, sites) if site.kind != "wrapper"]
        result = covered(["mine"], [site for site in sites if site != read_there], texts)
        frame = frames_of(text)[0]
        assert frame in result.unread
        assert any(str(frame) in line for line in lines_of(result))


def test_two_wrappers_on_one_line_are_told_apart() -> None:
    def wrapper(name: str, first: int, last: int) -> CallSite:
        return CallSite("a.py", 9, first, last, "f", name, "wrapper", "ops.py")

    add, gather, around = wrapper("add", 9, 9), wrapper("gather", 9, 9), wrapper("add", 8, 11)
    inside = "ops.py:3 in add.<locals>.<lambda> < ops.py:3 in add"
    assert hit_by(f"{inside} < a.py:9 in f", [add, gather, around]) == {add}
    assert hit_by(f"{inside} < a.py:8 in f", [add, gather, around]) == {around}
    assert not hit_by(f"{inside} < a.py:9 in g", [add, gather, around])
    assert not hit_by("a.py:9 in f", [add, gather, around])


def test_a_wrapper_that_is_an_object_is_reached_further_out() -> None:
    method = CallSite("a.py", 9, 9, 9, "f", "allreduce", "method")
    own = CallSite("ops.py", 3, 3, 3, "Comm.allreduce", "all_reduce", "operation")
    text = "ops.py:3 in Comm.allreduce < a.py:9 in f"
    assert hit_by(text, [method, own]) == {method, own}
    assert covered(["a.py"], [method], [text]).unread == ()
    assert covered(["ops.py"], [method], [text]).unread != ()


def test_calls_from_another_folder_are_not_counted(read: Write, tmp_path: Path) -> None:
    read(ops=OPS)
    (tmp_path / "mine/inner").mkdir()
    (tmp_path / "mine/inner/more.py").write_text("from mine import ops\nops.add(1)\n")
    sites = [site for site in read_sites(["mine"]) if site.kind == "wrapper"]
    assert [site.file for site in sites if not site.is_told] == ["mine/inner/more.py"]
    lines = Coverage(["mine"]).lines()
    assert not any("inner/more.py" in line for line in lines)
    assert sum(line.startswith("not counted: 1 calls of wrappers") for line in lines) == 1


def test_a_subject_that_runs_from_elsewhere_is_named(read: Write) -> None:
    read(ops=OPS)
    result = Coverage(["mine"])
    assert not any("elsewhere" in line for line in result.lines())
    result.see("/usr/lib/site-packages/mine/ops.py:4 in add.<locals>.<lambda>")
    assert any("imported from elsewhere" in line for line in result.lines())


def test_a_subject_without_communication(read: Write) -> None:
    assert read("x = 1") == []
    (line,) = Coverage(["mine"]).lines()
    assert line == ("collective coverage of mine: nothing that communicates was found by reading")


def test_paths_are_relative_to_the_root(
    read: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(ops=OPS)
    monkeypatch.chdir(tmp_path / "mine")
    result = Coverage(["mine/ops.py", "mine"], root=tmp_path)
    assert {site.file for site in result.sites} == {"mine/ops.py"}
    result.see("mine/ops.py:7 in run")
    said = "not found by reading: mine/ops.py:7 in run"
    assert any(line.startswith(said) for line in result.lines())
