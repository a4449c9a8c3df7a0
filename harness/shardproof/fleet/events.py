"""What a fleet reports to the controller."""

from __future__ import annotations

import os
import signal as signals
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

STOP: Final[dict[str, object]] = {"type": "stop"}
"""The message that asks a rank to return from its entry function. After it the channel ends."""


@dataclass(frozen=True, slots=True)
class Message:
    """A rank sent ``payload`` at ``at`` (``time.monotonic`` seconds, by the rank's own reading)."""

    rank: int
    payload: dict[str, Any]
    at: float


@dataclass(frozen=True, slots=True)
class Exited:
    """A rank's process has ended, with all that it had started.

    ``code`` is its exit code, None where ``signal`` ended it (or where nobody saw). ``at`` is when
    the fork server noticed, on the same clock as `Message.at`. ``note`` says what else is known,
    such as that a message was cut short.
    """

    rank: int
    code: int | None
    signal: int | None
    at: float
    note: str = ""

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                name = signals.Signals(self.signal).name
            except ValueError:
                name = "a real-time signal"
            how = f"killed by {name} ({self.signal})"
        elif self.code is not None:
            how = f"exited with code {self.code}"
        else:
            how = "ended in a way that is not known"
        return f"rank {self.rank} {how}" + (f"; {self.note}" if self.note else "")


Event: TypeAlias = Message | Exited


def exited(rank: int, status: int, at: float, note: str = "") -> Exited:
    """Build the event from a wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return Exited(rank, None, -code, at, note)
    return Exited(rank, code, None, at, note)
