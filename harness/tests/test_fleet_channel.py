from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shardproof.fleet.channel import MAX_FDS, Channel
from shardproof.fleet.codec import encode
from shardproof.fleet.errors import (
    ChannelClosed,
    ChannelTimeout,
    FleetError,
    MessageError,
    ProtocolError,
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair(peer="the other")
    other = Channel(theirs, peer="the one")
    yield ours, other
    ours.close()
    other.close()


def test_messages_go_both_ways_in_order(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    for number in range(3):
        ours.send({"number": number})
    assert [theirs.receive()["number"] for _ in range(3)] == [0, 1, 2]
    theirs.send({"back": True})
    assert ours.receive(5.0) == {"back": True}


def test_a_wait_ends_in_time_and_names_the_peer(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(ChannelTimeout, match=r"no message from the other within 0.01 s"):
        ends[0].receive(0.01)


def test_messages_sent_before_the_end_are_received_after_it(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    theirs.send({"last": "words"})
    theirs.close()
    assert ours.receive() == {"last": "words"}
    for _ in range(2):
        with pytest.raises(ChannelClosed, match="the channel to the other is closed"):
            ours.receive()
    with pytest.raises(ChannelClosed):
        ours.send({})


def test_the_end_is_seen_by_one_whose_own_messages_were_never_read(
    ends: tuple[Channel, Channel],
) -> None:
    """A socket that is closed with unread data resets: that is an end like any other."""
    ours, theirs = ends
    ours.send({"unread": True})
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive()


def test_garbage_is_an_error_after_the_messages_before_it(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    theirs.send({"good": 1})
    os.write(theirs.fileno(), b"\xff" * 100)
    assert ours.receive() == {"good": 1}
    with pytest.raises(ProtocolError, match="something else than shardproof writes"):
        ours.receive()


def test_half_a_message_at_the_end_is_counted(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    os.write(theirs.fileno(), encode({"cut": "short"})[:-3])
    theirs.close()
    assert ours.drain() == []
    assert ours.eof
    assert ours.unfinished == len(encode({"cut": "short"})) - 3


def test_post_never_waits_and_flush_delivers_everything(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    for number in range(4):
        ours.post({"number": number, "filling": "x" * 2**20})
    assert ours.unsent > 2**20  # nobody reads yet, and we are here all the same
    received: list[int] = []
    while len(received) < 4:
        received += [message.payload["number"] for message in theirs.drain()]
        ours.flush()
    assert received == [0, 1, 2, 3]
    assert ours.unsent == 0


def test_post_to_a_closed_end_is_dropped(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    theirs.close()
    ours.post({"lost": True})
    assert ours.unsent == 0


def test_finish_ends_the_stream_after_what_was_posted(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.post({"filling": "x" * 2**21})
    ours.finish()
    received: list[Any] = []
    while not theirs.eof:
        received += theirs.drain()
        ours.flush()
    assert len(received) == 1
    theirs.send({"still": "open in this direction"})
    assert ours.receive()


def test_a_message_that_cannot_be_sent_leaves_the_channel_usable(
    ends: tuple[Channel, Channel],
) -> None:
    ours, theirs = ends
    for send in (ours.send, ours.post):
        with pytest.raises(MessageError):
            send({"bad": object()})
    ours.send({"good": 1})
    assert theirs.receive() == {"good": 1}


def test_after_a_send_that_was_cut_short_nothing_more_is_sent() -> None:
    """Otherwise the next message would be read as the rest of this one."""

    class Interrupted(socket.socket):
        def sendall(self, *args: object, **kwargs: object) -> None:
            self.send(b"\0\0")
            raise KeyboardInterrupt

    ours, theirs = socket.socketpair()
    channel = Channel(Interrupted(fileno=ours.detach()))
    with pytest.raises(KeyboardInterrupt):
        channel.send({"a": 1})
    with pytest.raises(ChannelClosed, match="cut short"):
        channel.send({"b": 2})
    assert theirs.recv(100) == b"\0\0"
    channel.close()
    theirs.close()


def test_several_threads_may_send(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends

    def work(name: int) -> None:
        for _ in range(50):
            ours.send({"name": name, "filling": str(name) * 5000})

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    received = [theirs.receive(10.0) for _ in range(200)]
    for thread in threads:
        thread.join()
    assert all(set(message["filling"]) == {str(message["name"])} for message in received)


def test_descriptors_travel_and_are_not_inherited(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    reading, writing = os.pipe()
    ours.send({"with": "descriptor"}, fds=[writing])
    os.close(writing)
    assert theirs.receive() == {"with": "descriptor"}
    [arrived] = theirs.take_fds()
    assert theirs.take_fds() == []
    assert not os.get_inheritable(arrived)
    os.write(arrived, b"through")
    assert os.read(reading, 10) == b"through"
    os.close(arrived)
    os.close(reading)


def test_too_many_descriptors_are_refused(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(FleetError, match=f"{MAX_FDS + 1} file descriptors do not fit"):
        ends[0].send({}, fds=[0] * (MAX_FDS + 1))
