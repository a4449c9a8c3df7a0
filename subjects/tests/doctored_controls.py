"""Controls that must not count: what ``test_controls.py`` shows its judge failing by."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from cases.conftest import build, checkpoint, pytest_collection_modifyitems, trainer
from cases.controls import controls, injected, sharing
from subjects.trainer import gather, reductions
from subjects.trainer.faults import FAULTS, Fault

_zeroed = FAULTS["one row zeroed"]
_reduce_weight = reductions.reduce_weight

DOCTORED = {
    # The case fails, but not where the fault is said to show.
    "misattributed": Fault(
        module=gather,
        name="scatter_rows",
        function=_zeroed.function,
        axis="any",
        case="test_outputs.test_target_logprobs",
        shows="*.ignored",
    ),
    # Nothing is changed.
    "survived": Fault(
        module=gather,
        name="scatter_rows",
        function=gather.scatter_rows,
        axis="any",
        case="test_outputs.test_target_logprobs",
        shows="*.logprobs",
    ),
    # A fault that raises where a value was to diverge.
    "misjudged": Fault(
        module=gather,
        name="scatter_rows",
        function=lambda: None,
        axis="any",
        case="test_outputs.test_target_logprobs",
        shows="*.logprobs",
    ),
    # A change of a few units of rounding.
    "weak": Fault(
        module=reductions,
        name="reduce_weight",
        function=lambda *args, **options: _reduce_weight(*args, **options) * (1 + 1e-13),
        axis="any",
        case="test_gradients.test_frozen_head",
        shows="grad.*",
    ),
}

globals().update(controls(DOCTORED, module=__name__))

__all__ = [
    "DOCTORED",
    "build",
    "checkpoint",
    "injected",
    "pytest_collection_modifyitems",
    "sharing",
    "trainer",
]
