"""Many forwards: which of them are this data-parallel rank's, and nestings of requests.

Wave w of a sequence that every rank passes runs element w * dp + dp_rank on each DP rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from subjects.trainer import agreement
from subjects.trainer.agreement import Circle, Fact
from subjects.trainer.facts import request_facts
from subjects.types import ForwardInput, ForwardOutput, MicroBatch, Nested

Forward = Callable[[ForwardInput], ForwardOutput]
Check = Callable[[ForwardInput], None]


def waves(elements: int, *, dp: int) -> int:
    """How many waves it takes until every element has run; the last may leave ranks without one."""
    return -(-elements // dp)


def schedule(elements: int, *, dp_rank: int, dp: int) -> list[int | None]:
    """The element of each wave on one data-parallel rank, None where it has none."""
    dealt = [wave * dp + dp_rank for wave in range(waves(elements, dp=dp))]
    return [at if at < elements else None for at in dealt]


def micro_batches(
    inputs: Sequence[Nested], forward: Forward, *, dp_rank: int, dp: int, yield_empty: bool
) -> Iterator[MicroBatch]:
    """The waves of this data-parallel rank; each runs when it is asked for."""
    for at in schedule(len(inputs), dp_rank=dp_rank, dp=dp):
        if at is not None:
            yield MicroBatch(at, run(inputs[at], forward))
        elif yield_empty:
            yield MicroBatch(None, None)


def run(nested: Nested, forward: Forward) -> Any:
    """``nested`` with each request answered by ``forward``, in order, in the same containers."""
    if isinstance(nested, ForwardInput):
        return forward(nested)
    if isinstance(nested, tuple):
        answers = [run(one, forward) for one in nested]
        make = getattr(nested, "_make", type(nested))
        return make(answers)
    # A copy keeps what a subclass carries besides its elements: an order, a default.
    answered: Any = copy.copy(nested)
    for at in nested if isinstance(nested, dict) else range(len(nested)):
        answered[at] = run(nested[at], forward)
    return answered


DEEPEST = 50
"""Containers within containers: far below where Python itself gives up."""


def requests_in(
    nested: object, path: str = "inputs", inside: tuple[int, ...] = ()
) -> Iterator[tuple[str, ForwardInput]]:
    """Each request with the path to it, in the order in which they run.

    ``inside`` are the identities of the containers around this one.

    Raises:
        TypeError: something that is neither a request nor a list, tuple or dict, with its path; or
            a container that holds itself, or more than ``DEEPEST`` within one another.
    """
    if isinstance(nested, ForwardInput):
        yield path, nested
    elif isinstance(nested, list | tuple | dict):
        if id(nested) in inside:
            raise TypeError(f"{path} is a container that it lies in itself; expected a finite tree")
        if len(inside) == DEEPEST:
            raise TypeError(f"inputs is nested more than {DEEPEST} deep; expected a flatter tree")
        around = (*inside, id(nested))
        named = nested.items() if isinstance(nested, dict) else enumerate(nested)
        for key, one in named:
            yield from requests_in(one, f"{path}[{key!r}]", around)
    else:
        raise TypeError(
            f"{path} is of type {type(nested).__name__}; expected a ForwardInput, or a list, tuple "
            "or dict of them (nested as you like)"
        )


def agree_on_request(
    request: ForwardInput,
    check_one: Check,
    circle: Circle,
    more: Callable[[ForwardInput], Mapping[str, Fact]],
) -> ForwardInput:
    """Refuse a request of ``forward`` on every rank of its batch; a collective.

    Returns it as ``ForwardInput.read`` does. ``more`` are further facts that these ranks must have
    alike, of a request that is right.

    Raises:
        DisagreementError: as ``agreement.agree``.
        Exception: what ``check_one`` raises, where every rank raises it.
    """
    found: list[ForwardInput] = []

    def facts() -> dict[str, Fact]:
        if not isinstance(request, ForwardInput):
            raise TypeError(
                f"the request is of type {type(request).__name__}; expected a ForwardInput (for "
                "nestings of them there are forward_micro_batches and dp_rank_forward)"
            )
        check_one(request)
        found.append(request.read())
        return {**request_facts(found[0]), **more(found[0])}

    agreement.agree("forward", facts, circle)
    return found[0]


def agree_on_sequence(inputs: object, check_one: Check, circle: Circle) -> None:
    """Refuse the inputs of ``forward_micro_batches`` on every rank; a collective.

    Raises:
        TypeError: no list or tuple, or a nesting that is none, where every rank passes one.
        DisagreementError: as ``agreement.agree``.
    """

    def facts() -> dict[str, Fact]:
        if not isinstance(inputs, list | tuple):
            raise TypeError(
                f"inputs is of type {type(inputs).__name__}; expected a list or tuple, whose "
                "elements are dealt out over the data-parallel ranks"
            )
        return nested_facts(inputs, check_one)

    agreement.agree("forward_micro_batches", facts, circle)


def agree_on_nesting(inputs: object, check_one: Check, circle: Circle) -> None:
    """Refuse the inputs of ``dp_rank_forward`` on every rank of its batch; a collective.

    Raises:
        TypeError: a nesting that is none, where every rank of the batch passes one.
        DisagreementError: as ``agreement.agree``.
    """
    agreement.agree("dp_rank_forward", lambda: nested_facts(inputs, check_one), circle)


def nested_facts(inputs: object, check_one: Check) -> dict[str, Fact]:
    """Check every request in ``inputs``, and what ranks must agree on.

    Raises:
        TypeError: a nesting that is none.
        ValueError, TypeError: what ``check_one`` raises, with the path to the request in front.
    """
    found: dict[str, Fact] = {}
    if isinstance(inputs, list | tuple | dict):
        elements = str(len(inputs))
        found["len(inputs)"] = Fact(elements.encode(), elements)
    for path, request in requests_in(inputs):
        try:
            check_one(request)
            found |= request_facts(request.read(), prefix=f"{path}.")
        except (ValueError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{path}: {error}") from error
    return found
