"""From a cell's results here and there to what they say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest

from shardproof.against.raised import ASSERTION, MISSING, RAISED
from shardproof.cells import PAYLOAD

CAUGHT: Final = "caught"
VACUOUS: Final = "vacuous for this change"
REGRESSION: Final = "regression"
NOT_RUNNABLE: Final = "not runnable there"
FAILS_ON_BOTH: Final = "fails on both"
ERROR_THERE: Final = "error there"
FAILS_HERE: Final = "fails here"
NOT_JUDGED: Final = "not judged"
WRONG_CODE: Final = "wrong code under test"

CONCLUSIONS: Final = (
    CAUGHT,
    VACUOUS,
    REGRESSION,
    NOT_RUNNABLE,
    ERROR_THERE,
    FAILS_ON_BOTH,
    FAILS_HERE,
    NOT_JUDGED,
    WRONG_CODE,
)
"""In the order in which they are counted."""

_PASSED = ("passed", "xpassed")
_BY_VERDICT = (
    "diverged",
    "vacuous",
    "invalid",
    "ranks disagree",
    "mismatched collectives",
    "crashed",
    "hung",
    "xfailed",
)


@dataclass(frozen=True)
class Half:
    """A cell on one side.

    ``how`` is by what it failed: ``verdict`` (the harness's, on values, or on ranks that crash,
    hang, disagree or call different collectives), ``assertion`` (the case's), ``missing API``,
    ``skip`` or ``error``; empty where it passed. ``text`` says it in a few lines, ``types`` are the
    exception's, base classes included.
    """

    outcome: str
    how: str
    text: str
    types: tuple[str, ...]
    result: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """Whether the cell passed."""
        return not self.how


def half_of(reports: Sequence[pytest.TestReport]) -> Half:
    """What one side's reports of a cell say.

    Raises:
        RuntimeError: no report carries a result, which every cell has.
    """
    decisive = next((report for report in reports if hasattr(report, PAYLOAD)), None)
    if decisive is None:
        raise RuntimeError("a cell ended without a result")
    result: Mapping[str, Any] = getattr(decisive, PAYLOAD)
    outcome = str(result["outcome"])
    failure = next((report for report in reports if report.outcome == "failed"), decisive)
    raised: Mapping[str, Any] = getattr(failure, RAISED, {})
    if outcome in _PASSED:
        return Half(outcome, "", "", (), result)
    if outcome == "skipped":
        return Half(outcome, "skip", f"skipped: {result.get('reason', '')}", (), result)
    if outcome in _BY_VERDICT:
        return Half(outcome, "verdict", _headline(str(result.get("message", ""))), (), result)
    text = str(raised.get("text", "")) or _headline(str(result.get("message", "")))
    how = str(raised.get("kind", ""))
    if not how:
        # A rank that lacks the item, though nothing failed to import: its ids follow from the
        # subject, and it has others there.
        how = MISSING if outcome == "not started" and "did not collect" in text else "error"
    return Half(outcome, how, text, tuple(raised.get("types", ())), result)


def conclude(here: Half, there: Half, expected: Sequence[str] = ()) -> str:
    """What both halves say together.

    ``expected`` are names of exceptions that the case says REV raises: such an error is a catch.
    """
    fails = there.how in ("verdict", ASSERTION) or bool(set(expected) & set(there.types))
    if here.passed:
        if there.passed:
            return VACUOUS
        if fails:
            return CAUGHT
        return NOT_RUNNABLE if there.how in (MISSING, "skip") else ERROR_THERE
    if there.passed:
        return REGRESSION
    return FAILS_ON_BOTH if fails or there.how == "error" else FAILS_HERE


def _headline(message: str) -> str:
    """The part of a failure's text that says most: its first observation, or its first line.

    Of the observation all lines: the last ones say what the values suggest.
    """
    head, _, rest = message.strip().partition("\n\n")
    if "observations failed on" not in head:
        return head.splitlines()[0] if head else ""
    return rest.partition("\n\n")[0].rstrip()
