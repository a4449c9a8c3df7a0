from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.fleet import capture
from shardproof.fleet.capture import OUTPUT_LIMIT, StreamFile


@pytest.fixture
def stream(tmp_path: Path) -> StreamFile:
    return StreamFile(tmp_path / "rank0.out")


def append(stream: StreamFile, data: bytes) -> None:
    with stream.path.open("ab") as file:
        file.write(data)


def test_a_stream_that_nobody_wrote_to_is_empty(stream: StreamFile) -> None:
    stream.mark()
    stream.trim()
    assert stream.read() == ""


def test_only_what_follows_the_mark_is_read(stream: StreamFile) -> None:
    append(stream, b"before\n")
    stream.mark()
    assert stream.read() == ""
    append(stream, b"after\n")
    assert stream.read() == "after\n"
    assert stream.read() == "after\n"  # reading takes nothing away


def test_the_middle_of_a_long_text_is_left_out_and_counted(stream: StreamFile) -> None:
    append(stream, b"skipped")
    stream.mark()
    append(stream, b"a" * 50 + b"b" * 1000 + b"c" * 50)
    assert stream.read(limit=100) == f"{'a' * 50}\n[... 1,000 bytes left out ...]\n{'c' * 50}"
    assert stream.read(limit=1100) == "a" * 50 + "b" * 1000 + "c" * 50


def test_text_that_is_not_utf8_is_shown_as_far_as_it_is(stream: StreamFile) -> None:
    append(stream, "é".encode() + b"\xff!")
    assert stream.read() == "é�!"


def test_a_mark_frees_a_long_text(stream: StreamFile) -> None:
    append(stream, b"x" * (OUTPUT_LIMIT + 1))
    stream.mark()
    assert stream.path.stat().st_size == 0
    append(stream, b"after")
    assert stream.read() == "after"


def test_the_middle_of_a_flood_is_freed_and_what_is_shown_stays(
    stream: StreamFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "KEPT_LIMIT", 8 * OUTPUT_LIMIT)
    append(stream, b"a" * 100)
    stream.mark()
    append(stream, b"".join(bytes([65 + part]) * OUTPUT_LIMIT for part in range(9)))
    before, shown = stream.path.stat(), stream.read(limit=2 * OUTPUT_LIMIT)
    stream.trim()
    after = stream.path.stat()
    assert after.st_size == before.st_size
    assert before.st_blocks - after.st_blocks > 6 * OUTPUT_LIMIT // 512
    # More than is kept for sure is never shown, whatever is asked for.
    assert stream.read(limit=9 * OUTPUT_LIMIT) == shown
    assert "\0" not in shown
    append(stream, b"the end")
    assert stream.read().endswith("the end")


def test_nothing_is_freed_below_the_limit(stream: StreamFile) -> None:
    append(stream, b"x" * (4 * OUTPUT_LIMIT))
    before = stream.path.stat().st_blocks
    stream.trim()
    assert stream.path.stat().st_blocks == before
