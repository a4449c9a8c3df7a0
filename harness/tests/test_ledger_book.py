"""What a rank writes down, read back from its file."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from shardproof.ledger import page
from shardproof.ledger.calls import Line, Place, encoded
from shardproof.ledger.sites import JOINED, Sites

HARNESS = Path(__file__).resolve().parents[1]
MADE = "def made():\n    return sys._getframe()\n"
# A process of its own: the ledger stays installed, and so does the group.
PROGRAM = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from shardproof.ledger import kernels

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2, dtype=torch.float64)
kernels.begin(Path(sys.argv[1]), 0, str)
BODY
print(json.dumps(kernels.end()[0]))
dist.destroy_process_group()
"""


def recorded(folder: Path, body: str) -> tuple[page.Ledger, dict[str, Any]]:
    """The file and the report of a rank alone that ran ``body``."""
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("BODY", body))
    done = subprocess.run(
        [sys.executable, str(program), str(folder)],
        cwd=folder,
        env={"PYTHONPATH": str(HARNESS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return page.read_page(folder, 0), json.loads(done.stdout)


def test_code_that_is_remembered_by_identity_is_kept() -> None:
    """Else new code could take its place in memory, and its name in the ledger."""
    sites = Sites()
    scope: dict[str, Any] = {"sys": sys}
    exec(compile(MADE, "made.py", "exec"), scope)  # noqa: S102 - code that can go
    (found,) = sites.path(scope["made"](), 1)
    assert found is not None
    code = weakref.ref(found[0])
    call: dict[str, Any] = {"match": 1, "bytes": 0}
    place = Place(("cp", "all_reduce", "SUM", "here", False), 2)
    remembered = encoded(call, line=Line(), total=[0, 0, 0], place=place, site=found)
    scope.clear()
    del found
    gc.collect()
    del sites
    assert code() is not None  # a call that is remembered keeps it
    del remembered
    gc.collect()
    assert code() is None


def test_what_sites_remember_is_kept() -> None:
    sites = Sites()
    scope: dict[str, Any] = {"sys": sys}
    exec(compile(MADE, "made.py", "exec"), scope)  # noqa: S102 - code that can go
    code = weakref.ref(scope["made"].__code__)
    sites.path(scope["made"](), 1)
    scope.clear()
    gc.collect()
    assert code() is not None
    del sites
    gc.collect()
    assert code() is None


def test_a_call_site_is_told_with_its_callers(tmp_path: Path) -> None:
    """A helper that calls for many says little; its callers are told apart, three frames in all."""
    body = """
def add(x):
    dist.all_reduce(x)

def step(x):
    add(x)

def case(x):
    step(x)
    add(x)

case(x)
"""
    ledger, _ = recorded(tmp_path, body)
    calls = [str(entry.call["site"]).split(JOINED) for entry in ledger.entries]
    assert [[frame.rpartition(" in ")[2] for frame in call] for call in calls] == [
        ["add", "step", "case"],
        ["add", "case", "<module>"],
    ]
    assert calls[0][0] == calls[1][0]


def test_callers_of_a_case_are_not_told() -> None:
    """Those of pytest, which called this one."""
    sites = Sites()
    (found,) = sites.path(sys._getframe(), 9)
    assert found[0] is sys._getframe().f_code


def test_callers_that_do_not_fit_are_left_out() -> None:
    sites = Sites()
    path = tuple(
        (compile("", f"{name * 50}.py", "exec"), line) for line, name in enumerate("abc", 1)
    )
    texts = sites.path_text(path).split(JOINED)
    assert len(texts) == 3
    assert sites.path_text(path, most=160) == JOINED.join(texts[:2])
    assert sites.path_text(path, most=1) == texts[0]


def test_the_ring_holds_the_newest_and_the_totals_hold_all(tmp_path: Path) -> None:
    body = """
for n in range(1100):
    dist.all_reduce(x)
"""
    ledger, report = recorded(tmp_path, body)
    assert (ledger.recorded, len(ledger.entries), ledger.whole) == (1100, page.SLOTS, False)
    assert [entry.number for entry in ledger.entries] == list(range(1100 - page.SLOTS + 1, 1101))
    assert [entry.sequence for entry in ledger.entries][-1] == 1100
    assert all(entry.state is page.State.ENDED for entry in ledger.entries)
    assert list(ledger.counts.values()) == [1100]
    assert report["totals"] == [["(0,)", "all_reduce", 1100, 1100 * 16, 0]]


def test_a_call_that_raised_is_taken_out_of_the_order(tmp_path: Path) -> None:
    """Other ranks may not have come so far: what raised says nothing to them."""
    body = """
dist.all_reduce(x)
try:
    dist.all_gather_into_tensor(torch.zeros(5, dtype=x.dtype), x)
except (RuntimeError, ValueError):
    pass
dist.barrier()
"""
    ledger, report = recorded(tmp_path, body)
    ended, refused = page.State.ENDED, page.State.REFUSED
    assert [(entry.operation, entry.sequence, entry.state) for entry in ledger.entries] == [
        ("all_reduce", 1, ended),
        ("all_gather_into_tensor", 2, refused),
        ("barrier", 2, ended),
    ]
    assert [count for count, _ in report["groups"].values()] == [2]


@pytest.mark.parametrize("state", [page.State.CALLED, page.State.WAITING])
def test_a_slot_that_is_being_written_reads_as_empty(tmp_path: Path, state: page.State) -> None:
    """A reader may come at any time: without its number a slot is none, whatever else it holds."""
    data = bytearray(page.FILE_SIZE)
    page.HEADER.pack_into(data, 0, page.MAGIC, page.SLOTS, page.SLOT_SIZE, page.GROUPS, 0, 2, 2)
    text = page.encode_call({"group": "g@0", "axis": "cp", "operation": "barrier", "match": 1})
    for slot, number in enumerate((1, 0)):
        at = page.SLOTS_AT + slot * page.SLOT_SIZE
        page.SLOT.pack_into(data, at, number, slot + 1, 1.0, 0.0, 7, len(text), state, 0)
        data[at + page.SLOT.size : at + page.SLOT.size + len(text)] = text
    page.page_file(tmp_path, 0).write_bytes(data)
    ledger = page.read_page(tmp_path, 0)
    assert [entry.number for entry in ledger.entries] == [1]
    assert not ledger.whole
