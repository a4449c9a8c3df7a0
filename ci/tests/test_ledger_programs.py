"""What `ci/ledger_cost.py` and `ci/ledger_suite` conclude. (What they measure is no test.)"""

from __future__ import annotations

import unittest
from typing import Any

import pytest

from ci import ledger_cost
from ci.ledger_cost import Cost
from ci.tests.programs import program


@pytest.mark.parametrize(
    ("on", "status", "words"),
    [
        (Cost(104.0, 90.0, {"a": 3.0}, 7), 0, "kept"),
        (Cost(106.0, 80.0, {"a": 2.0}, 7), 1, "EXCEEDED"),
        (Cost(104.0, 80.0, {"a": 2.0}, 0), 1, "nothing was recorded"),
        (Cost(104.0, 80.0, {"b": 2.0}, 7), 1, "no cell passed both ways"),
    ],
)
def test_the_limit_is_about_the_whole_suite(
    on: Cost, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ledger_cost.judge(Cost(100.0, 80.0, {"a": 2.0}), on) == status
    assert words in capsys.readouterr().out


def test_rounds_take_turns_and_the_least_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order = []

    def measure(ledger: str, topology: str, more: list[str]) -> Cost:
        assert (topology, list(more)) == ("cp4", ["-k", "x"])
        order.append(ledger)
        slow = 1.0 + len(order)
        return Cost(10 * slow, 5 * slow, {"a": slow, f"only {len(order)}": 1.0}, 3)

    monkeypatch.setattr(ledger_cost, "measure", measure)
    status = ledger_cost.main(["--rounds", "2", "--topology", "cp4", "--", "-k", "x"])
    assert order == ["off", "on", "on", "off"]
    out = capsys.readouterr().out
    assert "1 cells, 3 collectives" in out
    assert "whole suite, wall: without 20.00 s, with 30.00 s, ratio 1.500" in out
    assert "whole suite, processor: without 10.00 s, with 15.00 s, ratio 1.500" in out
    assert "cells alone, wall: without 2.00 s, with 3.00 s, ratio 1.500" in out
    assert status == 1


def test_a_test_that_ends_differently_is_told_and_run_again() -> None:
    ends: dict[tuple[str, bool], list[str]] = {
        ("same", False): ["passed"],
        ("same", True): ["passed"],
        ("broken", False): ["passed", "passed"],
        ("broken", True): ["failed: RuntimeError", "failed: RuntimeError"],
        ("now and then", False): ["timed out", "passed"],
        ("now and then", True): ["passed", "passed"],
    }

    def run(name: str, *, ledger: bool) -> str:
        return ends[name, ledger].pop(0)

    said: list[str] = []
    names = ["same", "broken", "now and then"]
    found: dict[str, Any] = program("ledger_suite").compare(names, run, limit=60.0, say=said.append)
    assert found == {
        "compared": 3,
        "of": 3,
        "without": {"passed": 2, "timed out": 1},
        "differ": ["broken"],
        "equal_again": ["now and then"],
    }
    assert "broken: passed, with the ledger failed: RuntimeError" in said
    assert not any(ends.values())
    assert program("ledger_suite").compare(names, run, limit=-1.0, say=said.append)["compared"] == 0


def test_ends_of_a_test_are_told_apart() -> None:
    class Sample(unittest.TestCase):
        def test_passes(self) -> None:
            pass

        def test_skips(self) -> None:
            self.skipTest("not here")

        def test_raises(self) -> None:
            raise ValueError("Process 1 exited with error code 10")

        def test_is_wrong(self) -> None:
            self.assertEqual(1, 2)  # noqa: PT009 - as torch's own tests do

        def test_waits(self) -> None:
            raise RuntimeError("Process 0 terminated or timed out after 60 seconds")

    def end(name: str) -> str:
        result = unittest.TestResult()
        Sample(name).run(result)
        return str(program("ledger_suite").outcome_of(result))

    assert end("test_passes") == "passed"
    assert end("test_skips") == "skipped"
    assert end("test_raises") == "failed: ValueError"
    assert end("test_is_wrong") == "failed: AssertionError"
    assert end("test_waits") == "timed out"
