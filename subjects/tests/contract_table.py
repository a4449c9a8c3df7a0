"""The contract of the trainer as its README tabulates it, and what is wrong with such a table."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = ROOT / "subjects/trainer/README.md"
HEADER = ["contract", "public names", "case", "fault"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One sentence of the contract: whose it is, the case that checks it, the faults it notices."""

    contract: str
    names: tuple[str, ...]
    case: str
    faults: tuple[str, ...]


def read_rows(text: str) -> list[Row]:
    """Rows of the tables of a document that have our header.

    Raises:
        ValueError: a row of another number of columns, or without a sentence, a name, one case or
            a fault.
    """
    rows, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells == HEADER:
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not set(line) <= set("|- "):
            rows.append(_row(line, cells))
    return rows


def _row(line: str, cells: Sequence[str]) -> Row:
    if len(cells) != len(HEADER):
        raise ValueError(f"contract table: {len(cells)} columns, expected {len(HEADER)}: {line}")
    names, cases, faults = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells[1:])
    if not (cells[0] and names and len(cases) == 1 and faults):
        raise ValueError(
            "contract table: expected a sentence, and in backticks the public names, one case and "
            f"the faults that it notices: {line}"
        )
    return Row(contract=cells[0], names=names, case=cases[0], faults=faults)


def problems(
    rows: Sequence[Row],
    *,
    names: Collection[str],
    cases: Collection[str],
    case_of: Mapping[str, str],
) -> list[str]:
    """What is wrong with the table, a sentence each; ``case_of`` gives each fault's case."""
    told = {name for row in rows for name in row.names}
    found = [f"{name} has no row" for name in sorted(names) if not _covered(name, told)]
    for row in rows:
        found += [f"{name}: no such public name" for name in row.names if name not in names]
        if row.case not in cases:
            found.append(f"{row.contract!r}: there is no case {row.case}")
        for fault in row.faults:
            if fault not in case_of:
                found.append(f"{row.contract!r}: there is no fault {fault!r}")
            elif case_of[fault] != row.case:
                found.append(
                    f"{row.contract!r}: the fault {fault!r} is about {case_of[fault]}, "
                    f"not {row.case}"
                )
    return found


def _covered(name: str, told: Collection[str]) -> bool:
    """A class is told of by its members."""
    return name in told or any(one.startswith((f"{name}.", f"{name}(")) for one in told)


def all_cases() -> set[str]:
    """``test_module.test_function`` of every case."""
    return {
        f"{path.stem}.{node.name}"
        for path in (ROOT / "cases").glob("test_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def public_names() -> set[str]:
    """All that a user of the trainer can name.

    ``forward``: a method or property of TrainerRank. ``build(plan)``: an option of it.
    ``Optimizer.step``, ``ForwardInput.top_k``: members of the other classes. ``TopK``: what the
    package exports.
    """
    from subjects import trainer, types
    from subjects.protocol import OptimizerOptions
    from subjects.trainer import TrainerRank
    from subjects.trainer.optimizer import Optimizer

    found = set(_methods(TrainerRank))
    found |= {f"build({option})" for option in _options(TrainerRank.build)}
    found |= {f"Optimizer.{name}" for name in _methods(Optimizer)}
    found |= {f"optimizer({option})" for option in OptimizerOptions.__annotations__}
    records = [types.ForwardInput, types.ForwardOutput, types.TopK, types.LocalLogits]
    for record in (*records, types.MicroBatch, types.StepResult):
        found |= {f"{record.__name__}.{name}" for name in _fields(record)}
    return found | set(trainer.__all__) - {"TrainerRank"}


def _methods(cls: type) -> Iterator[str]:
    kinds = (staticmethod, classmethod, property)
    for name, value in vars(cls).items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds)):
            yield name


def _options(function: Any) -> Iterator[str]:
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in ("self", "cls") and parameter.kind is not parameter.VAR_KEYWORD:
            yield name


def _fields(record: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(record):
        for field in dataclasses.fields(record):
            yield field.name
    else:
        yield from record._fields
