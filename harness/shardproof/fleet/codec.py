"""Messages as bytes: a length, the time of sending, and strict JSON.

Strict means that what arrives equals what was sent. Python's encoder turns the key ``1`` into
``"1"`` and writes ``NaN``, which is not JSON; both are refused here, with the place named. The
one liberty is that tuples arrive as lists.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .errors import MessageError, ProtocolError

MESSAGE_LIMIT: Final = 64 * 2**20
"""Bytes a message may have unless a channel says otherwise. Bulk data belongs in files."""

_HEADER: Final = struct.Struct(">Id")
_DEPTH_LIMIT: Final = 100


@dataclass(frozen=True, slots=True)
class Received:
    """A message and the time at which its sender wrote it (``time.monotonic`` seconds).

    The monotonic clock is one clock for all processes of a host, so these times tell which of
    two ranks failed first, whenever the controller got round to reading.
    """

    payload: dict[str, Any]
    at: float


def encode(message: Mapping[str, object], *, limit: int = MESSAGE_LIMIT) -> bytes:
    """Return the frame for ``message``.

    Raises MessageError, naming the offending key, for anything but a mapping of strings to None,
    bool, int, finite float, str, and lists, tuples and mappings of these, and for a message that
    is larger than ``limit`` bytes.
    """
    if not isinstance(message, Mapping):
        raise MessageError(
            f"a message must be a mapping with string keys, not {_type_name(message)}"
        )
    body = json.dumps(_plain(message, "message", 0), separators=(",", ":")).encode("ascii")
    if len(body) > limit:
        raise MessageError(
            f"the message has {len(body):,} bytes, the limit is {limit:,}; {_largest(message)}. "
            "Write bulk data to a file in a directory that both sides share and send its path"
        )
    return _HEADER.pack(len(body), time.monotonic()) + body


class Decoder:
    """Turns a stream of bytes, cut anywhere, back into messages."""

    def __init__(self, *, limit: int = MESSAGE_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self.error: ProtocolError | None = None

    @property
    def pending(self) -> int:
        """Bytes of a message that is not complete yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Received]:
        """Take ``data`` and return the messages that are now complete.

        Where the bytes cannot be a message, ``error`` is set and nothing is read any more.
        """
        complete: list[Received] = []
        if self.error is not None:
            return complete
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                length, at = _HEADER.unpack_from(self._buffer, start)
                if length > self._limit:
                    raise ProtocolError(
                        f"the peer announces a message of {length:,} bytes where at most "
                        f"{self._limit:,} are allowed; something else than shardproof writes to "
                        "this channel"
                    )
                end = start + _HEADER.size + length
                if len(self._buffer) < end:
                    break
                complete.append(
                    Received(_load(bytes(self._buffer[start + _HEADER.size : end])), at)
                )
                start = end
        except ProtocolError as error:
            self.error = error
        del self._buffer[:start]
        return complete


def _load(body: bytes) -> dict[str, Any]:
    try:
        payload = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"the peer sent {body[:80]!r}, which is not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise ProtocolError(f"the peer sent a {_type_name(payload)} where a mapping is expected")
    return payload


def _plain(value: object, where: str, depth: int) -> object:
    """Return ``value`` built of plain JSON types, or raise and say where it is not."""
    if depth > _DEPTH_LIMIT:
        raise MessageError(
            f"{where[:200]}... is nested deeper than {_DEPTH_LIMIT} levels; does it hold itself?"
        )
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise MessageError(f"{where} is {value!r}, which JSON cannot hold; send a string")
        return float(value)
    if isinstance(value, Mapping):
        plain: dict[str, object] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise MessageError(
                    f"{where} has the key {key!r} of type {_type_name(key)}; keys must be strings"
                )
            plain[str(key)] = _plain(item, f"{where}[{key!r}]", depth + 1)
        return plain
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise MessageError(
        f"{where} is of type {_type_name(value)} and cannot be sent to another process; send "
        "None, bool, int, float, str, or lists and string-keyed mappings of these"
    )


def _largest(message: Mapping[str, object]) -> str:
    sizes = {key: len(json.dumps(_plain(value, key, 0))) for key, value in message.items()}
    key = max(sizes, key=lambda name: sizes[name])
    return f"most of it, {sizes[key]:,} bytes, is under the key {key!r}"


def _type_name(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
