"""A contract that is not kept: errors that one rank alone has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from subjects.trainer import (
    agreement,
    batches,
    facts,
    forward,
    reductions,
)
from subjects.trainer.agreement import Circle, DisagreementError, Fact
from subjects.trainer.faults.fault import Fault
from subjects.trainer.rank import TrainerRank
from subjects.types import ForwardInput

_MEANING = "test_contract.test_requests_without_meaning_are_refused"
_ONE_RANK = "test_contract.test_what_one_rank_alone_is_told_is_refused_by_all"
_agree = agreement.agree
_nested_facts = batches.nested_facts
_request_facts = facts.request_facts


def _own_words(call: str, facts: Callable[[], Mapping[str, Fact]], circle: Circle) -> None:
    try:
        _agree(call, facts, circle)
    except DisagreementError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise


def _unnamed(call: str, texts: Sequence[str | None], circle: Circle) -> str:
    del texts, circle
    return f"{call} was refused by some ranks"


def _values_left_out(call: str, facts: Sequence[Mapping[str, Any]], circle: Circle) -> str:
    del facts
    return f"{call} was given different things on the ranks of {circle.name}"


def _always_same(rows: Tensor) -> bool:
    del rows
    return True


def _in_step(call: str, rows: Tensor, circle: Circle) -> None:
    del call, rows, circle


def _no_autocast() -> str:
    return "off"


def _no_facts(value: object, op: object) -> dict[str, Fact]:
    del value, op
    return {}


def _nothing_told(told: object) -> dict[str, Fact]:
    del told
    return {}


def _slots_left_out(request: ForwardInput, *, prefix: str = "") -> dict[str, Fact]:
    found = _request_facts(request, prefix=prefix)
    del found[f"{prefix}slot"]
    return found


def _without_path(inputs: object, check_one: Callable[[ForwardInput], None]) -> dict[str, Fact]:
    try:
        return _nested_facts(inputs, check_one)
    except ValueError as error:
        raise error.__cause__ or error from None


def _unchecked(trainer: TrainerRank, request: ForwardInput) -> None:
    del trainer, request


FAULTS: dict[str, Fault] = {
    "requests are not checked before the collectives": Fault(
        module=forward,
        name="check",
        function=_unchecked,
        axis="any",
        case=_MEANING,
        shows="raised: ",
    ),
    "a bad request in a nesting is not told by its path": Fault(
        module=batches,
        name="nested_facts",
        function=_without_path,
        axis="any",
        case=_MEANING,
        shows="raised: inputs['a'][1]: ",
    ),
    "each rank raises its own error": Fault(
        module=agreement,
        name="agree",
        function=_own_words,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: not all ranks raise",
    ),
    "the rank that refuses is not named": Fault(
        module=agreement,
        name="refused_text",
        function=_unnamed,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: was refused by some ranks",
    ),
    "what differs between requests is not told": Fault(
        module=agreement,
        name="differing_text",
        function=_values_left_out,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: was given different things",
    ),
    "requests of the ranks of a batch are not compared": Fault(
        module=agreement,
        name="same_rows",
        function=_always_same,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
    "slots of requests are not compared": Fault(
        module=batches,
        name="request_facts",
        function=_slots_left_out,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
    "options of ranks are not compared": Fault(
        module=facts,
        name="option_facts",
        function=_nothing_told,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
    "plans of ranks are not compared": Fault(
        module=facts,
        name="plan_facts",
        function=_nothing_told,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
    "what ranks train is not compared": Fault(
        module=facts,
        name="training_facts",
        function=_nothing_told,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
    "kinds of values are not compared": Fault(
        module=reductions,
        name="value_facts",
        function=_no_facts,
        axis="dp",
        case=_ONE_RANK,
        shows="raised: differ at collective",
    ),
    "ranks that make different calls are not told": Fault(
        module=agreement,
        name="check_step",
        function=_in_step,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: not all ranks raise",
    ),
    "autocast of ranks is not compared": Fault(
        module=facts,
        name="autocast",
        function=_no_autocast,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
}
"""By what is wrong."""
