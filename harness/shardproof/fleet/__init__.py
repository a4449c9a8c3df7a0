"""Rank processes: forked from a warm server, talked to over pipes, and sure to end.

Nothing here knows about pytest or about what ranks compute.

The controller starts one fork server (`ForkServer`), which imports what ranks need, stays without
threads, and forks ranks on request. Each rank has a channel of its own to the controller (JSON
messages over a socket pair), its descriptors 1 and 2 go to files, and it leads a session of its
own. Whoever dies is survived by somebody who cleans up:

- a rank: the fork server ends what the rank had started, then reports how it ended;
- the controller: the fork server sees the end of its channel and ends everything;
- the fork server: its ranks get SIGKILL from the kernel, and a small guardian process, as well as
  the controller, end what they had started;
- all of them at once: the next run finds the directory that they left, and what runs under its
  token.
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
    PreloadThreadError,
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
    "PreloadThreadError",
    "ProtocolError",
    "RankProcess",
    "ServerError",
    "SurvivorError",
    "make_scratch",
    "remove_scratch",
    "scratch_root",
    "wait",
]
