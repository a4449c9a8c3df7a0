"""Every public name of the trainer has a sentence of its contract, a case, and a fault it notices.

That each fault is noticed by its case is shown by ``test_controls.py``, for all of them.
"""

from __future__ import annotations

import pytest

from subjects.tests.contract_table import README, all_cases, problems, public_names, read_rows

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

TABLE = """
| contract | public names | case | fault |
| --- | --- | --- | --- |
| Full sequences | `forward`, `Out.states` | `test_a.test_one` | `rows lost` |
| Sums | `reduce` | `test_a.test_two` | `summed twice`, `never \\| summed` |

| other | table |
| --- | --- |
| `x` | `y` |
"""
NAMES = {"forward", "Out", "Out.states", "reduce"}
CASES = {"test_a.test_one", "test_a.test_two"}
CASE_OF = {
    "rows lost": "test_a.test_one",
    "summed twice": "test_a.test_two",
    "never \\| summed": "test_a.test_two",
}


def test_the_contract_is_whole() -> None:
    from subjects.trainer.faults import FAULTS

    rows = read_rows(README.read_text("utf-8"))
    case_of = {name: fault.case for name, fault in FAULTS.items()}
    found = problems(rows, names=public_names(), cases=all_cases(), case_of=case_of)
    assert not found, "\n".join(found)


def test_a_table_that_is_right_passes() -> None:
    assert len(read_rows(TABLE)) == 2
    assert not problems(read_rows(TABLE), names=NAMES, cases=CASES, case_of=CASE_OF)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (", `Out.states`", "", "Out has no row"),
        (", `Out.states`", "", "Out.states has no row"),
        ("`reduce`", "`reduces`", "reduce has no row"),
        ("`reduce`", "`reduces`", "reduces: no such public name"),
        ("test_a.test_two", "test_a.test_three", "there is no case test_a.test_three"),
        ("rows lost", "rows found", "there is no fault 'rows found'"),
        ("rows lost", "summed twice", "is about test_a.test_two, not test_a.test_one"),
        ("contract | public", "Contract | public", "forward has no row"),
    ],
)
def test_a_table_that_is_wrong_is_said_to_be(old: str, new: str, found: str) -> None:
    doctored = TABLE.replace(old, new)
    assert doctored != TABLE
    listed = problems(read_rows(doctored), names=NAMES, cases=CASES, case_of=CASE_OF)
    assert [text for text in listed if found in text]


@pytest.mark.parametrize("old", ["Sums", "`reduce`", "`test_a.test_two`", "`rows lost`"])
def test_a_row_that_lacks_something_is_refused(old: str) -> None:
    with pytest.raises(ValueError, match="expected a sentence, and in backticks"):
        read_rows(TABLE.replace(old, ""))


def test_a_row_with_another_number_of_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="3 columns, expected 4"):
        read_rows(TABLE.replace("| `rows lost` |", "|"))


def test_names_are_read_from_the_trainer_itself() -> None:
    names = public_names()
    assert {"forward", "named_gradients", "build(plan)", "ForwardInput.top_k"} <= names
    assert {"TopK.values", "Optimizer.step", "StepResult.norms"} <= names
    assert not [name for name in names if name.startswith("_") or "._" in name]
