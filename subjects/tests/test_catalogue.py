"""docs/catalogue.md and the faults say the same of each public bug: re-created, or not here."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import pytest

from subjects.tests.catalogue import DOCUMENT, Row, explained, read

ROWS = 89
REASONS = {
    "no attention sinks",
    "no biases",
    "no dropout",
    "no experts",
    "no inputs but tokens and targets",
    "no loss of its own",
    "no pipeline parallelism",
    "no positions of several axes",
    "no recurrent layers",
    "no sliding windows",
    "no temperature",
}
ABSENT = {"I"}
"""Families of parts that the trainer has not."""


def problems(
    rows: Sequence[Row], numbers: Mapping[str, Collection[int]], case_of: Mapping[str, str]
) -> list[str]:
    found = []
    said = {(name, row.number) for row in rows for name, _ in row.faults}
    told = {row.number for row in rows}
    for name, catalogue in numbers.items():
        found += [f"{one}: {name!r} re-creates it" for one in catalogue if (name, one) not in said]
        found += [f"{one}: no such row, says {name!r}" for one in catalogue if one not in told]
    for row in rows:
        if bool(row.faults) == bool(row.reason):
            found.append(f"{row.number}: expected faults or a reason, one of the two")
        if row.reason and row.reason not in REASONS:
            found.append(f"{row.number}: {row.reason!r} is no reason of the list")
        for name, case in row.faults:
            if name not in numbers:
                found.append(f"{row.number}: there is no fault {name!r}")
            elif row.number not in numbers[name]:
                found.append(f"{row.number}: {name!r} does not say that it re-creates it")
            elif case_of[name] != case:
                found.append(f"{row.number}: {name!r} is noticed by {case_of[name]}, not {case}")
    return found


def test_the_table_follows_from_the_faults() -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    from subjects.trainer.faults import FAULTS

    rows = read(DOCUMENT.read_text("utf-8"))
    numbers = {name: fault.catalogue for name, fault in FAULTS.items()}
    found = problems(rows, numbers, {name: fault.case for name, fault in FAULTS.items()})
    assert not found, "\n".join(found)


def test_every_bug_has_one_row() -> None:
    text = DOCUMENT.read_text("utf-8")
    rows = read(text)
    assert len(rows) == len({row.number for row in rows}) == ROWS
    # None is left unread because it is written in another way.
    assert len(re.findall(r"^\| \d+ \|", text, re.MULTILINE)) == ROWS


def test_every_family_of_a_part_that_we_have_is_represented() -> None:
    rows = read(DOCUMENT.read_text("utf-8"))
    without = {row.family for row in rows} - {row.family for row in rows if row.faults}
    assert without == ABSENT


def test_reasons_are_explained_and_used() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert {row.reason for row in read(text) if row.reason} == REASONS
    assert set(explained(text)) == REASONS


LINK = "[a thread](https://example.org/1)"
TABLE = f"""
| 1 | A loss | {LINK} | divided twice | `halved` (`test_a.test_b`); `lost` (`test_a.test_c`) |
| 2 | B sums | {LINK} | experts | not here: no experts |
"""
NUMBERS = {"halved": (1,), "lost": (1,)}
CASES = {"halved": "test_a.test_b", "lost": "test_a.test_c"}


def test_a_table_that_is_right_passes() -> None:
    assert [(row.number, row.family, row.words) for row in read(TABLE)] == [
        (1, "A", "loss"),
        (2, "B", "sums"),
    ]
    assert not problems(read(TABLE), NUMBERS, CASES)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("`lost` (`test_a.test_c`)", "", "1: 'lost' re-creates it"),
        ("`halved`", "`doubled`", "1: there is no fault 'doubled'"),
        ("test_a.test_b", "test_a.test_c", "1: 'halved' is noticed by test_a.test_b"),
        ("not here: no experts", "`lost` (`test_a.test_c`)", "2: 'lost' does not say"),
        ("no experts", "no time", "2: 'no time' is no reason of the list"),
        ("not here: no experts", "nothing", "2: expected faults or a reason"),
        ("`test_a.test_c`)", "`test_a.test_c`); not here: no experts", "1: expected faults or"),
        ("| 1 |", "| 3 |", "1: no such row, says 'halved'"),
    ],
)
def test_a_table_that_is_wrong_is_said_to_be(old: str, new: str, found: str) -> None:
    doctored = TABLE.replace(old, new)
    assert doctored != TABLE
    assert [text for text in problems(read(doctored), NUMBERS, CASES) if found in text]
