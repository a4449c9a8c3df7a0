"""Micro-batches that are dropped, run twice or dealt by the wrong rank, and wrong denominators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from subjects.protocol import ReduceOp, Value
from subjects.trainer import batches, losses, reductions
from subjects.trainer.batches import Forward
from subjects.trainer.faults.fault import Fault
from subjects.trainer.rank import TrainerRank
from subjects.trainer.reductions import Groups
from subjects.types import ForwardInput, MicroBatch, Nested

_ACCUMULATION = "test_micro_batches.test_accumulation_over_uneven_waves_is_one_batch"
_LAST_WINDOW = "test_micro_batches.test_last_window_of_a_loop_is_shorter"
_ELEMENTS = "test_micro_batches.test_every_element_is_run_once"
_LAZY = "test_micro_batches.test_waves_run_when_they_are_asked_for"
_SLOTS = "test_micro_batches.test_elements_choose_their_slots"
_OWN = "test_micro_batches.test_inputs_of_this_rank_alone"

_schedule = batches.schedule
_micro_batches = batches.micro_batches
_run = batches.run
_reduce_weight = reductions.reduce_weight
_dp_reduce = reductions.dp_reduce
_reduce_gradients = TrainerRank.reduce_gradients


def _whole_waves(elements: int, *, dp: int) -> int:
    return elements // dp


def _last_repeated(elements: int, *, dp_rank: int, dp: int) -> list[int | None]:
    return [
        elements - 1 if at is None else at for at in _schedule(elements, dp_rank=dp_rank, dp=dp)
    ]


def _in_blocks(elements: int, *, dp_rank: int, dp: int) -> list[int | None]:
    count = -(-elements // dp)
    return [at if at < elements else None for at in range(dp_rank * count, (dp_rank + 1) * count)]


def _by_number_of_rank(elements: int, *, dp_rank: int, dp: int) -> list[int | None]:
    del dp_rank, dp
    return _schedule(elements, dp_rank=dist.get_rank(), dp=dist.get_world_size())


def _numbered_by_wave(
    inputs: Sequence[Nested], forward: Forward, **options: Any
) -> Iterator[MicroBatch]:
    for wave, micro in enumerate(_micro_batches(inputs, forward, **options)):
        yield micro if micro.index is None else replace(micro, index=wave)


def _run_ahead(inputs: Sequence[Nested], forward: Forward, **options: Any) -> Iterator[MicroBatch]:
    return iter(list(_micro_batches(inputs, forward, **options)))


def _never_empty(
    inputs: Sequence[Nested], forward: Forward, *, dp_rank: int, dp: int, yield_empty: bool
) -> Iterator[MicroBatch]:
    del yield_empty
    return _micro_batches(inputs, forward, dp_rank=dp_rank, dp=dp, yield_empty=False)


def _always_empty(
    inputs: Sequence[Nested], forward: Forward, *, dp_rank: int, dp: int, yield_empty: bool
) -> Iterator[MicroBatch]:
    del yield_empty
    return _micro_batches(inputs, forward, dp_rank=dp_rank, dp=dp, yield_empty=True)


def _plain_tuples(nested: Nested, forward: Forward) -> Any:
    if isinstance(nested, tuple):
        return tuple(_plain_tuples(one, forward) for one in nested)
    return _run(nested, forward)


def _slot_of_the_first(nested: Nested, forward: Forward) -> Any:
    requests = [request for _, request in batches.requests_in(nested)]

    def alike(request: ForwardInput) -> Any:
        return forward(replace(request, slot=requests[0].slot))

    return _run(nested, alike)


def _dealt_again(trainer: TrainerRank, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return {key: _dealt_again(trainer, value) for key, value in inputs.items()}
    dp = trainer.groups.dp
    own = [
        trainer.forward(one) if at % dp.size() == dp.rank() else None
        for at, one in enumerate(inputs)
    ]
    return type(inputs)(own)


def _counted_here(value: Value, op: ReduceOp, groups: Groups, *, device: Any) -> Value:
    del op, groups, device
    return value.detach().clone() if isinstance(value, Tensor) else value


_windows: dict[int, tuple[Groups, int]] = {}


def _counted_since_the_start(value: Value, op: ReduceOp, groups: Groups, *, device: Any) -> Value:
    found = _dp_reduce(value, op, groups, device=device)
    if not isinstance(found, int):
        return found
    # Kept with the groups, whose identity could else belong to another trainer's later.
    _, before = _windows.get(id(groups), (groups, 0))
    _windows[id(groups)] = (groups, before + found)
    return type(value)(before + found)


def _divided_by_forwards(trainer: TrainerRank) -> None:
    fresh = trainer.reduced is None
    _reduce_gradients(trainer)
    if fresh:
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / trainer.forwards
        # What was reduced is known by its identity.
        trainer.reduced = {
            name: (id(parameter.grad), parameter.grad._version)
            for name, parameter in trainer.model.named_parameters()
            if parameter.grad is not None
        }


def _multiplied_by_dp(gradient: Tensor, groups: Groups, *, over_tp: bool) -> Tensor:
    return _reduce_weight(gradient, groups, over_tp=over_tp) * groups.dp.size()


def _mean_of_each(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else one * (20 / len(one)) for one in gradients)


FAULTS: dict[str, Fault] = {
    "last wave dropped where it is not full": Fault(
        module=batches,
        name="waves",
        function=_whole_waves,
        axis="dp",
        case=_ACCUMULATION,
        shows="grad.*",
        catalogue=(85,),
    ),
    "last element run again where a rank has none": Fault(
        module=batches,
        name="schedule",
        function=_last_repeated,
        axis="dp",
        case=_ELEMENTS,
        shows="run",
        catalogue=(85,),
    ),
    "elements dealt in blocks": Fault(
        module=batches,
        name="schedule",
        function=_in_blocks,
        axis="dp",
        case=_ELEMENTS,
        shows="element*.place in the order",
    ),
    "elements dealt by the number of the rank": Fault(
        module=batches,
        name="schedule",
        function=_by_number_of_rank,
        axis="cp",
        case=_ELEMENTS,
        shows="raised: forward was given different things",
        catalogue=(98,),
    ),
    "elements numbered by their wave": Fault(
        module=batches,
        name="micro_batches",
        function=_numbered_by_wave,
        axis="dp",
        case=_ELEMENTS,
        shows="raised: assert",
    ),
    "waves run ahead": Fault(
        module=batches,
        name="micro_batches",
        function=_run_ahead,
        axis="any",
        case=_LAZY,
        shows="half have a graph",
    ),
    "empty waves left out": Fault(
        module=batches,
        name="micro_batches",
        function=_never_empty,
        axis="dp",
        case=_ELEMENTS,
        shows="raised: assert",
    ),
    "empty waves yielded unasked": Fault(
        module=batches,
        name="micro_batches",
        function=_always_empty,
        axis="dp",
        case=_ELEMENTS,
        shows="raised: assert",
    ),
    "a tuple of the caller's own comes back plain": Fault(
        module=batches,
        name="run",
        function=_plain_tuples,
        axis="any",
        case=_ELEMENTS,
        shows="raised: assert",
    ),
    "an element runs with the slot of its first request": Fault(
        module=batches,
        name="run",
        function=_slot_of_the_first,
        axis="any",
        case=_SLOTS,
        shows="element*.policy",
    ),
    "inputs of one rank dealt out over dp": Fault(
        module=TrainerRank,
        name="dp_rank_forward",
        function=_dealt_again,
        axis="dp",
        case=_OWN,
        shows="raised: NoneType",
    ),
    "tokens of this rank alone counted": Fault(
        module=reductions,
        name="dp_reduce",
        function=_counted_here,
        axis="dp",
        case=_ACCUMULATION,
        shows="grad.*",
        catalogue=(27,),
    ),
    "tokens of earlier windows counted too": Fault(
        module=reductions,
        name="dp_reduce",
        function=_counted_since_the_start,
        axis="any",
        case=_LAST_WINDOW,
        shows="step1.*",
        catalogue=(32,),
    ),
    "gradients divided by the number of forwards": Fault(
        module=TrainerRank,
        name="reduce_gradients",
        function=_divided_by_forwards,
        axis="any",
        case=_ACCUMULATION,
        shows="grad.*",
        catalogue=(33,),
    ),
    "gradients multiplied by the ranks of dp": Fault(
        module=reductions,
        name="reduce_weight",
        function=_multiplied_by_dp,
        axis="dp",
        case=_ACCUMULATION,
        shows="grad.*",
        catalogue=(31,),
    ),
    "each micro-batch divided by its own rows": Fault(
        module=losses,
        name="passed_on",
        function=_mean_of_each,
        axis="any",
        case=_ACCUMULATION,
        shows="grad.*",
        catalogue=(34,),
    ),
}
