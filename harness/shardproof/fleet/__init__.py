"""Rank processes: forked from a warm server, talked to over pipes, and sure to end.

Nothing here knows about pytest or about what ranks compute.
"""

from __future__ import annotations

from .capture import Output
from .channel import Channel
from .cleanup import make_scratch, remove_scratch, scratch_root
from .errors import (
    ChannelClosed,
    ChannelTimeout,
    FleetError,
    MessageError,
    PreloadError,
    ProtocolError,
    ServerError,
    SurvivorError,
)
from .events import STOP, Event, Exited, Message
from .fleet import Fleet, RankProcess, wait
from .forkserver import DEFAULT_PRELOAD, ForkServer

__all__ = [
    "DEFAULT_PRELOAD",
    "STOP",
    "Channel",
    "ChannelClosed",
    "ChannelTimeout",
    "Event",
    "Exited",
    "Fleet",
    "FleetError",
    "ForkServer",
    "Message",
    "MessageError",
    "Output",
    "PreloadError",
    "ProtocolError",
    "RankProcess",
    "ServerError",
    "SurvivorError",
    "make_scratch",
    "remove_scratch",
    "scratch_root",
    "wait",
]
