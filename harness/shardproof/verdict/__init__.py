"""Observations and verdicts: whether every topology gives what one device gives."""

from __future__ import annotations

from .finish import finish_reference, reference_needs
from .gates import FEW_RUNS
from .message import failed, merge, outcome, render
from .placement import Placement, PlacementError, placement_of
from .recorder import Recorder, Role
from .store import StoreError

__all__ = [
    "FEW_RUNS",
    "Placement",
    "PlacementError",
    "Recorder",
    "Role",
    "StoreError",
    "failed",
    "finish_reference",
    "merge",
    "outcome",
    "placement_of",
    "reference_needs",
    "render",
]
