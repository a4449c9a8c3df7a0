"""Stacks as messages show them: what user code and torch were doing, without what ran the case."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy
import pytest
from _pytest import runner

import shardproof
from shardproof.fleet.stacks import shortened

HEAD = "Current thread 0x00007f (most recent call first):"
LEDGER = f"{shardproof.__path__[0]}/ledger/kernels.py"
RUNNERS = (runner.__file__, pluggy.__file__, LEDGER, "<frozen runpy>")
CALLS = ("/v/site-packages/torch/c10d.py", "/x/shardproof/helper.py", "/x/test_a.py")


def frames(paths: Iterable[str | None]) -> list[str]:
    return [f'  File "{path}", line {line} in f' for line, path in enumerate(paths, 1)]


def test_frames_that_run_a_case_are_counted() -> None:
    text = "\n".join([HEAD, *frames([LEDGER, LEDGER, *CALLS, *RUNNERS])])
    assert shortened(text).splitlines() == [
        HEAD,
        "  ... 2 frames of pytest and shardproof",
        *frames([None, None, *CALLS])[2:],
        "  ... 4 frames of pytest and shardproof",
    ]


def test_a_thread_of_the_plugin_keeps_its_innermost_frame() -> None:
    text = "\n".join(
        [HEAD, *frames(RUNNERS), "", HEAD, *frames(CALLS), "", HEAD, *frames([LEDGER])]
    )
    assert shortened(text).splitlines() == [
        *[HEAD, *frames(RUNNERS[:1]), "  ... 3 frames of pytest and shardproof", ""],
        *[HEAD, *frames(CALLS), ""],
        *[HEAD, *frames([LEDGER])],
    ]


@pytest.mark.parametrize("text", ["", "(no stack: rank 1, process 9, is gone)"])
def test_what_is_no_stack_stays(text: str) -> None:
    assert shortened(text) == text


def test_a_crash_in_a_stream_is_shortened_and_all_else_stays() -> None:
    """A traceback of an exception has lines of the same form."""
    said = ["gloo: 8 vs 4", "Traceback (most recent call last):", *frames(RUNNERS), "E: \x0c1\r"]
    crash = ["Fatal Python error: Aborted", "", HEAD, *frames([*CALLS, *RUNNERS]), ""]
    modules = "Extension modules: numpy.linalg, torch._C (total: 2)"
    assert shortened(
        "\n".join([*said, *crash, modules, "Extension modules: mine", ""])
    ) == "\n".join(
        [
            *[*said, *crash[:3], *frames(CALLS), "  ... 4 frames of pytest and shardproof", ""],
            *["Extension modules: mine", ""],
        ]
    )
