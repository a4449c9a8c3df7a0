from __future__ import annotations

import enum
import json
import math
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.fleet.codec import Decoder, encode
from shardproof.fleet.errors import MessageError


class Colour(enum.IntEnum):
    RED = 3


ITEMS: dict[str, object] = {
    "none": None,
    "yes": True,
    "count": 2**70,
    "ratio": 1.0e-300,
    "text": "Größe \U0001f600 \ud800 \0",
    "nested": {"list": [1, [2.5, {"deep": ""}]], "empty": {}},
}


def test_what_arrives_equals_what_was_sent() -> None:
    [received] = Decoder().feed(encode(ITEMS))
    assert received.payload == ITEMS
    assert type(received.payload["yes"]) is bool


def test_tuples_arrive_as_lists_and_enumerations_as_numbers() -> None:
    [received] = Decoder().feed(encode({"pair": (1, 2), "colour": Colour.RED}))
    assert received.payload == {"pair": [1, 2], "colour": 3}


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_messages_cut_anywhere(step: int) -> None:
    stream = b"".join(encode({"number": number, "text": "x" * number}) for number in range(20))
    decoder = Decoder()
    received = [
        message
        for start in range(0, len(stream), step)
        for message in decoder.feed(stream[start : start + step])
    ]
    assert [message.payload["number"] for message in received] == list(range(20))
    assert decoder.pending == 0


def test_the_time_is_that_of_sending() -> None:
    before = time.monotonic()
    frame = encode({})
    after = time.monotonic()
    [received] = Decoder().feed(frame)
    assert before <= received.at <= after


CYCLE: dict[str, Any] = {}
CYCLE["itself"] = CYCLE


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"path": Path("/x")}, r"message\['path'\] is of type pathlib\S*Path"),
        ({"a": {"b": [0, b"raw"]}}, r"message\['a'\]\['b'\]\[1\] is of type bytes"),
        ({"loss": torch.ones(2)}, r"message\['loss'\] is of type torch.Tensor"),
        ({"names": {"x"}}, r"message\['names'\] is of type set"),
        ({"sizes": {1: "x"}}, r"message\['sizes'\] has the key 1 of type int"),
        ({"ratio": math.nan}, r"message\['ratio'\] is nan"),
        ({"ratio": [math.inf]}, r"message\['ratio'\]\[0\] is inf"),
        (CYCLE, r"nested deeper than 100 levels; does it hold itself"),
        ([1], r"must be a mapping with string keys, not list"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, named: str) -> None:
    with pytest.raises(MessageError, match=named):
        encode(value)


def test_the_largest_key_of_an_oversized_message_is_named() -> None:
    with pytest.raises(MessageError, match=r"1,0\d\d bytes, the limit is 500; .* key 'big'.* file"):
        encode({"small": "x" * 10, "big": "x" * 1000}, limit=500)


@pytest.mark.parametrize(
    ("body", "reason"), [(b"{", "not JSON"), (b"[1]", "list where a mapping"), (b"\xff", "JSON")]
)
def test_a_body_that_is_no_message(body: bytes, reason: str) -> None:
    decoder = Decoder()
    [good] = decoder.feed(encode({"good": 1}) + struct.pack(">Id", len(body), 0.0) + body)
    assert good.payload == {"good": 1}
    assert reason in str(decoder.error)
    assert decoder.feed(encode({"after": 1})) == []


def test_bytes_of_a_stranger_are_refused_before_they_are_collected() -> None:
    decoder = Decoder()
    assert decoder.feed(b"HTTP/1.1 200 OK\r\n") == []
    assert "something else than shardproof" in str(decoder.error)


def test_the_body_is_ordinary_json() -> None:
    assert json.loads(encode({"a": [1, None]})[12:]) == {"a": [1, None]}
