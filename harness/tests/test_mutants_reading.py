"""Call sites that communicate, found by reading: each kind of import, of call and of name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import CodeType

import pytest
from tests.mutants_support import OPS, Write, found_in

from shardproof.mutants.reading import CallSite, ReadingError, read_sites

ROOT = Path(__file__).parents[2]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)
    return partial(found_in, tmp_path)


@pytest.mark.parametrize(
    ("imported", "called", "name"),
    [
        ("import torch", "torch.distributed.all_reduce", "all_reduce"),
        ("import torch.distributed", "torch.distributed.all_reduce", "all_reduce"),
        ("import torch.distributed as dist", "dist.all_gather_object", "all_gather_object"),
        ("from torch import distributed", "distributed.send", "send"),
        ("from torch.distributed import all_reduce", "all_reduce", "all_reduce"),
        ("from torch.distributed import all_reduce as add", "add", "all_reduce"),
        ("from torch.distributed import *", "broadcast", "broadcast"),
        ("from torch.distributed import distributed_c10d as c", "c.reduce", "reduce"),
        (
            "import torch.distributed._functional_collectives as funcol",
            "funcol.all_gather_tensor",
            "all_gather_tensor",
        ),
        ("import torch.distributed.nn.functional as F", "F.all_to_all", "all_to_all"),
        ("from torch.distributed import nn", "nn.functional.reduce", "reduce"),
        ("from torch.distributed.nn import all_gather", "all_gather", "all_gather"),
        ("import torch", "torch.ops._c10d_functional.all_reduce.default", "all_reduce"),
        ("import torch; ops = torch.ops.c10d", "ops.broadcast_", "broadcast_"),
        ("import torch.distributed as dist; add = dist.all_reduce", "add", "all_reduce"),
        ("import torch.distributed as d; add: object = d.all_reduce", "add", "all_reduce"),
        (
            "import torch.distributed as d; f = d.all_gather if d else d._all_gather_base",
            "f",
            "all_gather",
        ),
        ("import torch.distributed as d; f = getattr(d, 'isend', None)", "f", "isend"),
        (
            "import functools; import torch.distributed as d; f = functools.partial(d.gather, 1)",
            "f",
            "gather",
        ),
        ("import torch.distributed as dist", "dist.group.WORLD.barrier", "barrier"),
        ("import torch.distributed as dist", "dist.new_group([0]).gather", "gather"),
        ("import torch.distributed as d; g = d.new_group()", "g.scatter", "scatter"),
        ("", "mesh.get_group('cp').barrier", "barrier"),
    ],
)
def test_each_kind_of_import(read: Write, imported: str, called: str, name: str) -> None:
    source = f"{imported}\ndef step(x, mesh):\n    return {called}(x)\n"
    assert read(source) == [f"3 operation {name} in step"]
    if "*" not in imported:
        inside = imported.replace("; ", "\n    ")
        source = f"def step(x, mesh):\n    {inside}\n    return {called}(x)\n"
        assert read(source) == [f"{source.count(chr(10))} operation {name} in step"]


def test_methods_of_groups(read: Write) -> None:
    found = read("""\
        import queue, torch.distributed as dist
        from typing import Optional

        class A:
            def f(self, group: dist.ProcessGroup, other: "dist.ProcessGroup | None", x):
                group.broadcast([x])
                other.barrier()
                self.group.allreduce([x])
                self.group.broadcast([x])
                x.gather(0, x)
                group.size()

        def g(group: Optional[dist.ProcessGroup] = None, *, socket):
            group.send([1], 0, 0)
            socket.send(b"")

        KEPT = None

        def start():
            global KEPT
            KEPT = dist.new_group()

            def inner():
                nonlocal mine
                mine.reduce([1])
                mine = None

            mine = KEPT
            KEPT.gather([1], [1])

        def use():
            KEPT.scatter([1], [1])
        """)
    assert found == [
        "6 operation broadcast in A.f",
        "7 operation barrier in A.f",
        "8 method allreduce in A.f",
        "14 operation send in g",
        "25 operation reduce in start.<locals>.inner",
        "29 operation gather in start",
        "32 operation scatter in use",
    ]


def test_what_only_looks_like_an_operation(read: Write) -> None:
    found = read("""\
        import torch.distributed as dist
        from mpi import all_reduce
        from torch.distributed import ReduceOp, broadcast

        def f(dist, x):
            return dist.all_reduce(x), (lambda y: broadcast.sum(y))(x)

        run = lambda dist: dist.barrier()

        def g(x, op):
            all_reduce(x)
            broadcast = x.expand
            broadcast(3)
            if op is dist.isend or op == dist.irecv:
                print(dist.all_reduce.__name__, ReduceOp.SUM, dist.get_rank())

        def h(x: dist.all_reduce) -> broadcast:
            '''Calls dist.all_reduce(x).'''
        """)
    # `broadcast` is this function's own, beside which the module's is hidden.
    assert found == []


def test_functions_that_are_passed_on(read: Write) -> None:
    found = read("""\
        import torch.distributed as dist
        from functools import partial

        def f(run, x, group):
            run(lambda: dist.all_reduce(x))
            run(partial(dist.broadcast, src=0))
            run(
                x,
                call=dist.all_gather,
            )
            return dist.reduce

        TABLE = {"sum": dist.all_reduce}

        def g(x, peer):
            sent = [dist.P2POp(dist.isend, x, peer), dist.P2POp(op=dist.irecv, tensor=x)]
            dist.batch_isend_irecv(sent)
        """)
    assert found == [
        "5 operation all_reduce in f.<locals>.<lambda>",
        "6 passed on broadcast in f",
        "9 passed on all_gather in f",
        "11 passed on reduce in f",
        "13 passed on all_reduce in <module>",
        "17 operation batch_isend_irecv in g",
    ]
    (passed,) = (site for site in read_sites(["mine"]) if site.name == "all_gather")
    assert (passed.first, passed.last) == (7, 10)


def test_an_assignment_to_itself_ends(read: Write) -> None:
    lines = "\n".join(
        f"    x, y = f(y), x\n    x = x.g(y)\n    y = y.h(x)({at})" for at in range(60)
    )
    source = f"import torch.distributed as dist\ndef step(x, y):\n{lines}\n    dist.barrier()\n"
    assert read(source) == ["183 operation barrier in step"]
    read("class A(A):\n    def f(self):\n        self.g()\n")
    read("from .other import *\nf()", other="from .code import *\ng()")


def test_calls_of_wrappers_count_one_level_deep(read: Write) -> None:
    source = """\
        import mine.ops
        from mine import ops as functions
        from . import ops
        from .ops import Comm, Function, add, more
        from mine.ops import run

        def f(x):
            add(x)
            mine.ops.add(x)
            functions.add(x)
            ops.add(x)
            more(x)
            run(x, print)

        def g(x, comm: Comm):
            made = Comm(x)
            made.gather(x)
            comm.gather(x)
            made(x)
            Comm.send(x)
            Function.apply(x)

        class Child(ops.Comm):
            def h(self, x):
                self.gather(x)
                self.k(x)

            def k(self, x):
                return f(x)
    """
    assert [one for one in read(source, ops=OPS) if " wrapper " in one] == [
        "8 wrapper add in f",
        "9 wrapper add in f",
        "10 wrapper add in f",
        "11 wrapper add in f",
        "12 wrapper add in f",
        "16 wrapper Comm.__init__ in g",
        "17 wrapper Comm.gather in g",
        "18 wrapper Comm.gather in g",
        "20 wrapper Comm.send in g",
        "21 wrapper Function.forward in g",
        "25 wrapper Comm.gather in Child.h",
        "15 wrapper Comm.gather in Comm.__call__",
        "20 wrapper Comm.gather.<locals>.inner in Comm.gather",
        "25 wrapper Comm.both in Comm.send",
        "29 wrapper Comm.send in Comm.both",
    ]


NESTED = """\
import torch.distributed as dist

class A:
    class B:
        def f(self, xs):
            def g(x):
                return lambda: dist.all_reduce(x)
            for x in xs:
                g(x)()
            [dist.broadcast(x, 0) for x in xs]
            {x: dist.all_gather([], x) for x in xs}
            list(dist.reduce(x, 0) for x in xs)
            [(lambda: dist.gather(x))() for x in xs]
            dist.scatter(
                xs,
                0,
            ), dist.barrier()

    def h(self, xs=dist.get_rank()):
        return [
            y
            for x in dist.all_gather_object([], xs)
            for y in (dist
                .recv(x),)
        ]

async def k(x, y=lambda: (lambda: dist.isend(1))()):
    dist.irecv(x)
    y()
"""


def codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_of(inner)


def assert_named_as_compiled(sites: tuple[CallSite, ...]) -> None:
    assert sites
    for file in {site.file for site in sites}:
        lines = {
            (code.co_qualname, line)
            for code in codes_of(compile(Path(file).read_bytes(), file, "exec"))
            for _, _, line in code.co_lines()
        }
        for site in sites:
            assert site.file != file or (site.function, site.line) in lines, site


def test_functions_are_named_as_python_names_them(
    read: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(read(NESTED)) == 12
    assert_named_as_compiled(read_sites(["mine"]))
    monkeypatch.chdir(ROOT)
    assert_named_as_compiled(read_sites(["subjects/trainer"]))


def test_a_subject_that_cannot_be_read(read: Write, tmp_path: Path) -> None:
    read("x = 1")
    with pytest.raises(ReadingError, match=r"nothing to read: expected paths .*shardproof_subject"):
        read_sites([])
    with pytest.raises(ReadingError, match=r"cannot read src: expected a file or folder .*mend"):
        read_sites(["src"])
    (tmp_path / "empty/.hidden").mkdir(parents=True)
    (tmp_path / "empty/.hidden/code.py").touch()
    with pytest.raises(ReadingError, match=r"nothing to read in empty: expected \*\.py below"):
        read_sites(["empty"])
    for text in (b"x = 1\ndef f(:\n", b"\xff\xfe", b"# coding: nothing\n", b"x\0"):
        (tmp_path / "mine/code.py").write_bytes(text)
        with pytest.raises(
            ReadingError, match=r"cannot read mine/code\.py.*: expected source"
        ) as e:
            read_sites(["mine"])
        assert "mend the file, or take it out of shardproof_subject" in str(e.value)
    (tmp_path / "mine/code.py").write_bytes(b"x = 1\ndef f(:\n")
    with pytest.raises(ReadingError, match=r"mine/code\.py:2: "):
        read_sites(["mine"])


def test_call_sites_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sites = read_sites(["subjects/trainer"])
    direct = [site for site in sites if site.kind != "wrapper"]
    assert [f"{site.kind} {site.name} in {site.function}" for site in direct] == [
        "operation all_reduce in all_reduce.<locals>.<lambda>",
        "operation all_gather_into_tensor in all_gather_rows",
        "operation all_to_all_single in rotate",
        "operation broadcast in broadcast_first.<locals>.<lambda>",
    ]
    assert {site.file for site in direct} == {"subjects/trainer/collectives.py"}
    wrappers = {"all_reduce", "all_gather_rows", "rotate", "broadcast_first"}
    # All that call one by its module, by their text: the trainer imports none by its name.
    written = {
        f"{path.relative_to(ROOT)}:{number} {name}"
        for path in (ROOT / "subjects/trainer").glob("*.py")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for name in wrappers
        if f"collectives.{name}(" in line
    }
    found = [site for site in sites if site.kind == "wrapper" and site.is_told]
    assert {f"{site.file}:{site.line} {site.name}" for site in found} == written
    assert {site.name for site in found} == wrappers
    # Faults stand in for functions of the trainer, and are never part of a run with mutants.
    others = {site.file for site in sites if not site.is_told}
    assert all(file.startswith("subjects/trainer/faults/") for file in others)
