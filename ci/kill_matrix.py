"""The kill matrix of all negative controls: faults of the trainer, and mutants of collectives.

Reads what two runs left in the folders that ``--parity-report`` named: one of cases/controls.py,
and one with ``--mutants``. Prints how many faults of each family of docs/catalogue.md their cases
killed, how many mutants of each kind, the share of both together, and each that was not killed. A
fault with rows of several families counts in each, one that shows on several topologies once, with
its worst result.

Exits with 1 when a fault is not killed (a sample leaves most of them out), a family that applies
has no killed fault, fewer than 95 percent of the mutants that make a difference are killed or
refused by the trainer itself, or one survives that is not in cases/survivors.txt; with 2 when a
folder does not hold the results of such a run.

    python ci/kill_matrix.py CONTROLS_FOLDER MUTANTS_FOLDER
    python ci/kill_matrix.py --only controls CONTROLS_FOLDER
    python ci/kill_matrix.py --only mutants MUTANTS_FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, Final

from shardproof.mutants.matrix import (
    aligned,
    changing,
    mattering,
    shares_of,
    table_of,
    telling,
    unkilled,
)
from shardproof.mutants.survivors import Listed, SurvivorsError, read_survivors, unlisted
from shardproof.results import FILE_NAME, SCHEMA

# A program finds its own folder alone.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from subjects.tests.catalogue import DOCUMENT, Row, explained, read
from subjects.tests.judge import judge, of_fault

if TYPE_CHECKING:
    from subjects.trainer.faults import Fault

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ("killed", "misattributed", "survived", "weak", "misjudged", "not run")
WORST: Final = ("survived", "misattributed", "misjudged", "weak", "not run", "killed")
"""What counts of a fault that shows on several topologies: the first of these."""
CONTROLS: Final = "cases/controls.py::"
CONTRACT: Final = "of the contract"
SURVIVORS: Final = ROOT / "cases/survivors.txt"
LEAST: Final = 0.95
WIDTH: Final = 240


class ReportError(ValueError):
    """A folder does not hold the results that were asked for."""


@dataclass
class Part:
    """What one of the two runs comes to.

    ``killed`` of ``total`` ``things`` are killed; ``lines`` are its tables, ``left`` has a line for
    each that was not killed, ``problems`` what fails.
    """

    things: str
    killed: int
    total: int
    lines: list[str]
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def cells_of(folder: Path) -> list[dict[str, Any]]:
    """The cells of a run.

    Raises:
        ReportError: no results there, a line that is no object, or another version of the schema.
    """
    path = folder / FILE_NAME
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(
            f"{path}: expected the results of a run, got {error}; name the folder that the run's "
            "--parity-report named"
        ) from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ReportError(
                f"{path}:{number}: expected a JSON object, got {line[:60]!r}; the run was killed "
                "while it wrote, or something else wrote there: run it again"
            )
        lines.append(value)
    schema = lines[0].get("schema") if lines else "an empty file"
    if schema != SCHEMA:
        raise ReportError(
            f"{path}: expected schema {SCHEMA} in its first line, got {schema!r}; run it again "
            "with the shardproof of this checkout"
        )
    return lines[1:]


def verdicts_of(folder: Path, faults: Mapping[str, Fault]) -> dict[str, str]:
    """By name of each fault, its worst result with the words for it; ``killed`` alone has none.

    Raises:
        ReportError: no results of a controls run, or of one with other faults.
    """
    cells = [cell for cell in cells_of(folder) if str(cell["case"]).startswith(CONTROLS)]
    if not cells:
        raise ReportError(
            f"{folder / FILE_NAME}: expected cells of {CONTROLS.rstrip(':')}, got none; run pytest "
            "cases/controls.py --parity-report FOLDER and name that folder"
        )
    ran = {str(cell["case"]).partition("[")[2].removesuffix("]") for cell in cells}
    if ran - set(faults):
        raise ReportError(
            f"{folder / FILE_NAME}: expected faults of subjects/trainer/faults, got "
            f"{', '.join(map(repr, sorted(ran - set(faults))))}; run cases/controls.py again, with "
            "one seed and with the faults of this checkout"
        )
    return {name: _verdict(folder, cells, name, fault) for name, fault in faults.items()}


def _verdict(folder: Path, cells: Sequence[Mapping[str, Any]], name: str, fault: Fault) -> str:
    try:
        found = of_fault(cells, name)
    except ValueError as error:
        raise ReportError(
            f"{folder / FILE_NAME}: expected each fault once on a topology, but {error}; run "
            "cases/controls.py again, once"
        ) from error
    said = [(judge(fault, cell), f"{fault.case} on {topology}") for topology, cell in found.items()]
    said += [
        ("not run: no result", f"{fault.case} on {topology}")
        for topology in fault.topologies
        if topology not in found
    ]
    words, where = min(said, key=lambda one: WORST.index(_result(one[0])))
    result, _, reason = words.partition(": ")
    if result == "killed":
        return result
    return textwrap.shorten(f"{result}: {name} ({where}): {reason}", WIDTH, placeholder=" ...")


def _result(verdict: str) -> str:
    return verdict.partition(":")[0]


def of_controls(verdicts: Mapping[str, str], faults: Mapping[str, Fault], page: str) -> Part:
    """Families of the catalogue by results of their faults."""
    rows = read(page)
    family_of = {row.number: row.family for row in rows}
    members: dict[str, list[str]] = {}
    for name, fault in faults.items():
        for family in {family_of[one] for one in fault.catalogue} or {CONTRACT}:
            members.setdefault(family, []).append(name)
    table = [["family", *RESULTS, ""]]
    problems = []
    for letter in ascii_uppercase[: 1 + ascii_uppercase.index(max(family_of.values()))]:
        own = [row for row in rows if row.family == letter]
        label = f"{letter} {own[0].words}" if own else letter
        names = members.get(letter, [])
        note = "" if names else f"no fault: {_why_none(own, explained(page))}"
        table.append([label, *_counts(verdicts[name] for name in names), note])
        if any(not row.reason for row in own) and "killed" not in map(verdicts.get, names):
            problems.append(f"no fault of family {label} is killed, and the catalogue has it")
    others = (verdicts[name] for name in members.get(CONTRACT, []))
    table.append([CONTRACT, *_counts(others), ""])
    table.append(["all, each once", *_counts(verdicts.values()), ""])
    left = sorted(
        (text for text in verdicts.values() if text != "killed"),
        key=lambda text: WORST.index(_result(text)),
    )
    if left:
        problems.insert(
            0,
            f"{len(left)} of {len(verdicts)} faults are not killed, expected none: see what each "
            "came to, and close the hole with a case (CONTRIBUTING.md)",
        )
    killed = len(verdicts) - len(left)
    return Part("faults", killed, len(verdicts), aligned(table), left, problems)


def _counts(verdicts: Iterable[str]) -> list[str]:
    counts = Counter(map(_result, verdicts))
    return [str(counts[result] or "-") for result in RESULTS]


def _why_none(rows: Sequence[Row], reasons: Mapping[str, str]) -> str:
    """Why a family has no fault, as the page says."""
    if not rows:
        return "no row in the catalogue"
    given = dict.fromkeys(row.reason for row in rows if row.reason)
    said = [f"{one} ({reasons[one]})" if one in reasons else one for one in given]
    return "; ".join(said) or "the catalogue gives no reason"


def of_mutants(folder: Path, listed: Sequence[Listed]) -> Part:
    """Kinds of mutants by their results.

    Raises:
        ReportError: no results of a run with mutants.
    """
    cells = cells_of(folder)
    trials = telling(cells)
    if not trials:
        raise ReportError(
            f"{folder / FILE_NAME}: expected cells with trials of mutants, got none in "
            f"{len(cells)} cells; run pytest cases --mutants all --parity-report FOLDER and name "
            "that folder"
        )
    changes = changing(trials)
    killed = sum(trial["result"] == "killed" for trial in changes)
    noticed = killed + sum(trial["result"] == "refused" for trial in changes)
    matter = mattering(trials, listed)
    problems = []
    if noticed < LEAST * matter or not matter:
        problems.append(
            f"{noticed} of {matter} mutants that make a difference are killed or refused, expected "
            f"{LEAST:.0%}: observe what the others change"
        )
    bare = unlisted(trials, listed)
    if bare:
        problems.append(
            f"{len(bare)} survive without a reason in cases/{SURVIVORS.name}: observe what they "
            f"change, or list them (docs/mutants.md): {'; '.join(bare[:3])}"
        )
    lines = [*table_of(trials), *shares_of(trials, listed)]
    left = unkilled(changes, listed)
    things = "mutants that change a number"
    return Part(things, killed, len(changes), lines, left, problems)


def conclude(parts: Sequence[Part]) -> int:
    """Print the tables, the share of all together and what was not killed; 0 when nothing fails."""
    for part in parts:
        print("\n".join(part.lines), end="\n\n")
    killed, total = sum(part.killed for part in parts), sum(part.total for part in parts)
    each = ", ".join(f"{part.killed} of {part.total} {part.things}" for part in parts)
    share = f"{100 * killed / total:.1f} %" if total else "none"
    print(f"{killed} of {total} negative controls are killed ({share}): {each}")
    for line in (line for part in parts for line in part.left):
        print(line)
    problems = [problem for part in parts for problem in part.problems]
    print("\n".join(["", *problems, "FAILS"] if problems else ["", "holds"]))
    return 1 if problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, print, and say by the exit status whether the negative controls are killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--only", choices=("controls", "mutants"), help="one folder, of such a run")
    options = parser.parse_args(arguments)
    names = [options.only] if options.only else ["controls", "mutants"]
    if len(options.folders) != len(names):
        many = "folders" if len(names) > 1 else "folder"
        parser.error(
            f"expected {len(names)} {many}, of {' and '.join(names)}, got {len(options.folders)}; "
            "--only controls or --only mutants takes one"
        )
    folders = dict(zip(names, options.folders, strict=True))
    parts = []
    try:
        if "controls" in folders:
            from subjects.trainer.faults import FAULTS

            verdicts = verdicts_of(folders["controls"], FAULTS)
            parts.append(of_controls(verdicts, FAULTS, DOCUMENT.read_text("utf-8")))
        if "mutants" in folders:
            parts.append(of_mutants(folders["mutants"], read_survivors(SURVIVORS)))
    except (ReportError, SurvivorsError) as error:
        parser.exit(2, f"kill_matrix: {error}\n")
    return conclude(parts)


if __name__ == "__main__":
    sys.exit(main())
