"""A two-way channel of JSON messages over a Unix stream socket."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .codec import MESSAGE_LIMIT, Decoder, Received, encode
from .errors import ChannelClosed, ChannelTimeout, FleetError, ProtocolError

MAX_FDS: Final = 250
"""File descriptors one message can carry (the kernel stops at 253)."""

_CHUNK: Final = 1 << 18


class Channel:
    """One end of a channel.

    Ranks use `send` and `receive`, which block. The controller must never wait for a rank that
    does not read, so it uses `post`, `flush` and `drain`, which don't. `send` may be called by
    several threads; everything else belongs to one.
    """

    def __init__(
        self, sock: socket.socket, *, peer: str = "the peer", limit: int = MESSAGE_LIMIT
    ) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._peer = peer
        self._limit = limit
        self._decoder = Decoder(limit=limit)
        self._inbox: deque[Received] = deque()
        self._outbox = bytearray()
        self._fds: list[int] = []
        self._lock = threading.Lock()
        self._eof = False
        self._broken = False
        self._finishing = False

    @classmethod
    def pair(cls, *, peer: str = "the peer") -> tuple[Channel, socket.socket]:
        """Return one end as a channel and the bare socket of the other, for another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours, peer=peer), theirs

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 once closed."""
        return self._sock.fileno()

    @property
    def eof(self) -> bool:
        """Whether the other end is known to be closed."""
        return self._eof

    @property
    def error(self) -> ProtocolError | None:
        """What makes the bytes that came unreadable as messages, None while they are."""
        return self._decoder.error

    @property
    def unsent(self) -> int:
        """Bytes that `post` took and the socket did not, so far."""
        return len(self._outbox)

    @property
    def unfinished(self) -> int:
        """Bytes of an incoming message whose rest has not come."""
        return self._decoder.pending

    # Blocking use -----------------------------------------------------------------------------

    def send(self, message: Mapping[str, object], *, fds: Sequence[int] = ()) -> None:
        """Send ``message``, and duplicates of ``fds``, waiting until the socket has taken it.

        Raises MessageError for what cannot be sent and ChannelClosed where nobody listens.
        """
        if len(fds) > MAX_FDS:
            raise FleetError(f"{len(fds)} file descriptors do not fit in a message ({MAX_FDS} do)")
        frame = memoryview(encode(message, limit=self._limit))
        with self._lock:
            if self._broken:
                raise self._closed("a send was cut short")
            # Until the frame is out as a whole the stream is of no use to anyone: an interrupt
            # in here must not let a later message start in the middle of this one.
            self._broken = True
            try:
                if fds:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                    sent = self._sock.sendmsg([frame], [rights], socket.MSG_NOSIGNAL)
                    frame = frame[sent:]
                self._sock.sendall(frame, socket.MSG_NOSIGNAL)
            except OSError as error:
                raise self._closed(str(error)) from error
            self._broken = False

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the next message, waiting at most ``timeout`` seconds (None: without end).

        When every message that came has been returned, raises ChannelClosed if the other end is
        closed and ProtocolError if what follows is no message; else ChannelTimeout in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._inbox:
            if self.error is not None:
                raise self.error
            if self._eof:
                raise self._closed("end of file")
            if not self._readable(deadline):
                raise ChannelTimeout(f"no message from {self._peer} within {timeout} s")
            self._read(0)
        return self._inbox.popleft().payload

    def take_fds(self) -> list[int]:
        """Return, once, the descriptors that came with the messages received so far."""
        fds, self._fds = self._fds, []
        return fds

    # Use that never blocks --------------------------------------------------------------------

    def post(self, message: Mapping[str, object]) -> None:
        """Queue ``message`` and send what the socket takes now; `flush` sends the rest."""
        self._outbox += encode(message, limit=self._limit)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now. What goes to a closed end is dropped."""
        while self._outbox:
            try:
                with memoryview(self._outbox) as view:
                    sent = self._sock.send(view[:_CHUNK], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._outbox.clear()
                return
            del self._outbox[:sent]
        if self._finishing:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def drain(self) -> list[Received]:
        """Return every message that is there by now, without waiting.

        See `eof` and `error` for what comes after them.
        """
        while not self._eof and self._read(socket.MSG_DONTWAIT):
            pass
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def finish(self) -> None:
        """Close this direction once all that was posted is sent.

        The other end's `receive` then raises ChannelClosed.
        """
        self._finishing = True
        self.flush()

    def close(self) -> None:
        """Close this end. May be called again."""
        for fd in self.take_fds():
            os.close(fd)
        self._eof = True
        self._broken = True
        self._outbox.clear()
        self._sock.close()

    # ------------------------------------------------------------------------------------------

    def _readable(self, deadline: float | None) -> bool:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        wait = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        return bool(poller.poll(wait))

    def _read(self, flags: int) -> bool:
        """Read once into the inbox; False when there was nothing to read."""
        space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self._sock.recvmsg(
                _CHUNK, space, flags | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError:  # a reset: the other end died with messages of ours unread
            self._eof = True
            return False
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._fds.extend(received)
        if not data:
            self._eof = True
            return False
        self._inbox.extend(self._decoder.feed(data))
        return True

    def _closed(self, why: str) -> ChannelClosed:
        return ChannelClosed(f"the channel to {self._peer} is closed ({why})")
