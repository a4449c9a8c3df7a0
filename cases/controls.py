"""Negative controls: each known fault, put into the trainer, runs the case that is about it.

Not collected with the cases; ``subjects/tests/test_controls.py`` runs it and judges what it left.
There is one test here for each case and choice of its parameters, with all the faults that it must
notice: they share its reference, which no fault touches. A fault runs on the smallest topology
where it shows (``Fault.topologies``), or on those that ``--topology`` names. CONTROLS in the
environment chooses: ``all``, or ``sample:SEED`` for some of every family.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from cases.parameters import marks_of, names_of, values_of
from subjects.trainer.faults import OF_FAMILY, Fault, chosen, replaced
from subjects.trainer.faults.sample import by_case

if TYPE_CHECKING:
    from types import ModuleType

    from shardproof import Rank

Control = Callable[..., None]
CHOSEN = chosen(OF_FAMILY, os.environ.get("CONTROLS", "all"))


@pytest.fixture(autouse=True)
def injected(rank: Rank, request: pytest.FixtureRequest, fault: str) -> Iterator[None]:
    """The fault is in on every rank, before anything is built, and never in the oracle."""
    if rank.is_reference:
        yield
        return
    with replaced(request.function.faults[fault]):
        yield


@pytest.fixture
def sharing(request: pytest.FixtureRequest) -> str:
    """One packing is enough here."""
    return str(request.function.chosen.get("sharing", "none"))


def controls(faults: Mapping[str, Fault], *, module: str) -> dict[str, Any]:
    """Tests of ``faults`` and the fixtures of their cases, by name, to be put into ``module``.

    Raises:
        LookupError: a fault names a case that doesn't exist, or a parameter or a value that its
            case has not.
        ValueError: two modules of cases have different fixtures of one name.
    """
    found: dict[str, Any] = {}
    for (case, params), names in by_case(faults).items():
        first = faults[names[0]]
        try:
            body, source = _case(case)
            test = _control(body, source, {name: faults[name] for name in names}, first.params)
        except LookupError as error:
            raise LookupError(f"fault {names[0]!r}: {error}") from error
        title = case.replace(".", "__") + "".join(f"__{_word(one)}" for one in params)
        test.__name__, test.__qualname__, test.__module__ = title, title, module
        found[title] = test
        for name, fixture in _fixtures(source).items():
            if found.setdefault(name, fixture) is not fixture:
                raise ValueError(
                    f"two modules of cases have a fixture {name!r}, one of them {case!r}'s; "
                    "controls can't have both: rename one, or move it to cases/conftest.py"
                )
    return found


def _case(name: str) -> tuple[Control, ModuleType]:
    stem, _, function = name.partition(".")
    if not (Path(__file__).parent / f"{stem}.py").is_file():
        raise LookupError(f"there is no {stem}.py in cases/")
    source = importlib.import_module(f"cases.{stem}")
    body = vars(source).get(function)
    if not inspect.isfunction(body):
        raise LookupError(f"cases/{stem}.py has no case {function}")
    return body, source


def _control(
    body: Control, source: ModuleType, faults: Mapping[str, Fault], params: Mapping[str, object]
) -> Any:
    """A test with the fixtures and the marker's options of ``body``, and ``fault`` beside them."""

    def control(*, fault: str, **fixtures: object) -> None:
        del fault
        body(**fixtures)

    signature = inspect.signature(body)
    fault = inspect.Parameter("fault", inspect.Parameter.KEYWORD_ONLY)
    test: Any = control
    test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), fault])
    test.__doc__ = body.__doc__
    test.faults, test.chosen = dict(faults), dict(params)
    marks = marks_of(body, source)
    left = set(params) - {"sharing"}
    for mark in marks:
        if mark.name == "parametrize":
            left -= set(names_of(mark))
            only = pytest.param(*values_of(mark, params), id=pytest.HIDDEN_PARAM)
            pytest.mark.parametrize(mark.args[0], [only])(test)
    if left:
        raise LookupError(f"{source.__name__}.{body.__name__} has no parameter {sorted(left)}")
    options: Mapping[str, Any] = next((m.kwargs for m in marks if m.name == "parity"), {})
    # One test runs on all topologies of its faults; conftest leaves out the pairs without meaning.
    topologies = dict.fromkeys(one for fault in faults.values() for one in fault.topologies)
    pytest.mark.parity(*topologies, **{**options, "reference_ignores": ["fault"]})(test)
    return pytest.mark.parametrize("fault", list(faults))(test)


def _fixtures(source: ModuleType) -> dict[str, object]:
    """Fixtures of a module of cases, which its cases find there and controls must find here."""
    return {name: value for name, value in vars(source).items() if isinstance(value, type(sharing))}


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text)


globals().update(controls(CHOSEN, module=__name__))
