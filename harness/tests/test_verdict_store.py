"""Files in shared memory: private, exact, found by extent alone."""

from __future__ import annotations

import errno
import math
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verdict_support import World, numbers

from shardproof.verdict.blocks import blocks
from shardproof.verdict.store import Reader, StoreError, Writer, read_index, write_index


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 40), (1, 100), (5, 0, 2)])
@pytest.mark.parametrize("limit", [1, 8, 33, 1000])
def test_blocks_cover_every_element_once(shape: tuple[int, ...], limit: int) -> None:
    counts = torch.zeros(shape)
    for index in blocks(shape, limit):
        assert counts[index].numel() <= limit
        counts[index] += 1
    assert bool((counts == 1).all())


def test_tensors_come_back_bit_by_bit(tmp_path: Path) -> None:
    values = [
        numbers(3, 5).T,
        numbers(4, dtype=torch.bfloat16),
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.arange(5, dtype=torch.int8),
        torch.tensor([math.nan, -0.0, math.inf]),
        numbers(2, 2).to(torch.float8_e5m2),
    ]
    writer = Writer(tmp_path / "x.bin")
    offsets = [writer.append(value) for value in values]
    writer.close()
    reader = Reader(tmp_path / "x.bin")
    for value, offset in zip(values, offsets, strict=True):
        found = reader.tensor(offset, value.dtype, tuple(value.shape))
        raw = value.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(found.reshape(-1).view(torch.uint8), raw)


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("../../evil/name\x00\n", numbers(4, 9)))
    for path in [world.reference_dir, *world.reference_dir.iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    stems = {path.stem for path in world.reference_dir.iterdir()}
    assert stems == {"reference", "repeat", "noise-0", "noise-1", "noise-2", "finish"}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "x.bin").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        Writer(tmp_path / "x.bin")
    assert target.read_text() == "kept"


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "x.bin")
    offset = writer.append(numbers(100))
    writer.close()
    path = tmp_path / "x.bin"
    path.write_bytes(path.read_bytes()[:80])
    with pytest.raises(StoreError, match="cut short"):
        Reader(path).tensor(offset, torch.float64, (100,))
    with pytest.raises(StoreError, match="no such file"):
        Reader(tmp_path / "other.bin")
    with pytest.raises(StoreError, match="did not finish"):
        read_index(tmp_path / "other.json")
    write_index(tmp_path / "list.json", [1])
    with pytest.raises(StoreError, match="expected an object"):
        read_index(tmp_path / "list.json")


def test_a_full_device_is_a_bad_observation_and_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: Writer, _value: torch.Tensor) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    world = World(tmp_path)
    monkeypatch.setattr(Writer, "append", full)

    def body(rank: Any) -> None:
        rank.observe("x", numbers(4, 9))

    world.run("reference", body)
    index: Any = read_index(world.reference_dir / "reference.json")
    assert "no room in shared memory" in index["problems"][0]["problem"]
