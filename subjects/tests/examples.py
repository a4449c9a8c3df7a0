"""Random forwards: how they are drawn, run on ranks, judged, and written down as a parity case."""

from __future__ import annotations

import math
import pprint
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardproof.topology import parse_topology
from subjects.protocol import Trainer
from subjects.tests import worlds
from subjects.tests.pool import Pool
from subjects.trainer.packing import Sharing, pack
from subjects.trainer.plan import POLICIES
from subjects.types import IGNORED, ForwardInput

VOCABULARY = 131
TOPOLOGIES = ("cp2", "cp4", "tp2xcp2")
SLOTS: dict[str, dict[str, Any]] = {
    "one": {"rank": 3, "alpha": 5.0},
    "other": {"rank": 5, "alpha": 3.0},
}
TINY = 1e-4
"""Gradients this much smaller than the largest are judged by it: their own digits are rounding."""

Document = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One forward and backward. ``targets`` has a tuple for each position, all of one length.

    ``chosen`` are the positions of which the loss reads hidden states, in that order.
    """

    topology: str
    documents: tuple[Document, ...]
    targets: tuple[tuple[int, ...], ...]
    chosen: tuple[int, ...]
    sharing: Sharing
    plan: str | tuple[tuple[int, ...], ...]
    attention: str
    block: int
    slot: str | None = None

    @property
    def asks(self) -> bool:
        """Whether any position has a target."""
        return any(one != IGNORED for row in self.targets for one in row)

    def request(self) -> ForwardInput:
        """What the trainer is asked."""
        return ForwardInput(
            [torch.tensor(document) for document in self.documents],
            torch.tensor(self.targets) if self.asks else None,
            hidden_states=True,
            slot=self.slot,
        )


@st.composite
def documents(draw: st.DrawFn, *, most: int = 6, longest: int = 9) -> tuple[Document, ...]:
    """Documents that often begin as an earlier one does, or are one: trees of several levels.

    Ids are few, so that prefixes are shared by chance as well.
    """
    found: list[Document] = []
    own = st.lists(st.integers(0, 4), max_size=longest).map(tuple)
    for number in range(draw(st.integers(1, most))):
        stem: Document = ()
        if number and draw(st.booleans()):
            stem = found[draw(st.integers(0, number - 1))]
            stem = stem[: draw(st.integers(0, len(stem)))]
        found.append(stem + draw(own) or (draw(st.integers(0, 4)),))
    return tuple(found)


def branches(asked: tuple[Document, ...]) -> int:
    """The most places on the path of one document at which the prefix tree branches."""

    def branch(prefix: Document) -> bool:
        at = len(prefix)
        return len({one[at] for one in asked if one[:at] == prefix and len(one) > at}) > 1

    return max(sum(branch(one[:at]) for at in range(1, len(one))) for one in asked)


@st.composite
def shards(draw: st.DrawFn, rows: int, cp: int) -> tuple[tuple[int, ...], ...]:
    """Any deal of 0..rows-1: runs between cuts, in any order, each forwards or backwards.

    Shards may be empty or hold everything; few cuts make long runs, many make single rows.
    """
    cuts = draw(st.lists(st.integers(1, rows), max_size=9)) if rows > 1 else []
    edges = sorted({0, rows, *cuts})
    found: list[list[int]] = [[] for _ in range(cp)]
    for start, stop in draw(st.permutations(list(pairwise(edges)))):
        run = list(range(start, stop))
        found[draw(st.integers(0, cp - 1))] += run[:: draw(st.sampled_from([1, -1]))]
    return tuple(map(tuple, found))


@st.composite
def examples(draw: st.DrawFn, *, topology: str) -> Example:
    """Any example on ``topology``."""
    asked = draw(documents())
    total = sum(map(len, asked))
    sharing: Sharing = draw(st.sampled_from(["none", "full"]))
    packed = pack([torch.tensor(document) for document in asked], sharing=sharing)
    # Bits of numbers: a position costs no draw of its own, and numbers shrink to 0.
    bits = st.integers(0, 2**total - 1)
    ignored = [draw(bits) for _ in range(draw(st.integers(1, 2)))]
    skipped = draw(bits)
    cp = parse_topology(topology).sizes.get("cp", 1)
    return Example(
        topology=topology,
        documents=asked,
        targets=tuple(
            tuple(
                IGNORED if one >> at & 1 else (37 * at + 11 * number + 5) % VOCABULARY
                for number, one in enumerate(ignored)
            )
            for at in range(total)
        ),
        chosen=tuple(at for at in range(total) if not skipped >> at & 1),
        sharing=sharing,
        plan=draw(st.sampled_from(sorted(POLICIES)) | shards(packed.rows, cp)),
        attention=draw(st.sampled_from(["gather", "ring"])),
        block=draw(st.sampled_from([512, 1, 2, 3, 7])),
        slot=draw(st.sampled_from([None, *SLOTS])),
    )


def add_slots(trainer: Trainer) -> None:
    """Give a trainer the slots that examples use; no factor is zero."""
    for name, options in SLOTS.items():
        trainer.add_slot(name, **options, factory=factor)


def factor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values of a slot's factor that depend on its name and shape alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shape}".encode()))
    bound: float = shape[1] ** -0.5
    return torch.randn(shape, generator=generator, dtype=torch.float64) * bound


def weights(total: int, dtype: torch.dtype) -> Tensor:
    """Unequal weights [T] of the rows in a loss."""
    return 0.5 + (torch.arange(total, dtype=dtype) * 7 % 11) / 11


def step(trainer: Trainer, example: Example) -> dict[str, Tensor]:
    """Outputs of a forward; its backward is done."""
    output = trainer.forward(example.request())
    states, logprobs = output.hidden_states, output.target_logprobs
    if states is None:
        raise ValueError("hidden states were asked for and none came")
    weight = weights(len(states), states.dtype)
    chosen = torch.tensor(example.chosen, dtype=torch.int64)
    loss = (states[chosen].square().mean(1) * weight[chosen]).sum()
    found = {"hidden_states": states.detach()}
    if logprobs is not None:
        found["logprobs"] = logprobs.detach()
        loss = loss - (logprobs * weight[:, None]).sum()
    loss.backward()
    return found


def expected_of(oracle: Trainer, example: Example) -> dict[str, Tensor]:
    """What one device has: outputs, and gradients by ``grad.`` and their name."""
    oracle.zero_gradients()
    found = step(oracle, example)
    for name, gradient, _ in oracle.named_gradients():
        if gradient is not None:
            found[f"grad.{name}"] = gradient
    return found


class RankOfExamples:
    """One warm trainer on one rank, turned to each example in turn."""

    def __init__(self, rank: worlds.TestRank, directory: Path) -> None:
        from subjects.trainer import TrainerRank

        worlds.make_parallel_state(rank)
        self.tp = rank.group("tp").rank(), rank.group("tp").size()
        self.trainer = TrainerRank.build(directory / "checkpoint", rank)
        add_slots(self.trainer)
        self.found: dict[str, Tensor] = {}
        self.placed: dict[str, Any] = {}

    def __call__(self, command: tuple[str, Any]) -> Any:
        """Run an example with or without a fault, or say how far it was from what was expected."""
        kind, value = command
        return self.run(*value) if kind == "run" else self.compare(value)

    def run(self, example: Example, fault: str | None) -> None:
        """Forward, backward and reduction."""
        from subjects.trainer.attention import AttentionOptions
        from subjects.trainer.faults import inject

        self.trainer.sharing, self.trainer.policy = example.sharing, example.plan
        self.trainer.attention_options = AttentionOptions(example.attention, example.block)  # type: ignore[arg-type]
        self.trainer.zero_gradients()
        with inject(fault) if fault else nullcontext():
            self.found, self.placed = step(self.trainer, example), {}
            for name, gradient, placement in self.trainer.named_gradients():
                if gradient is not None:
                    self.found[f"grad.{name}"] = gradient
                    self.placed[f"grad.{name}"] = placement.get("shard", {})

    def compare(self, path: str) -> dict[str, float]:
        """The distance of everything that was found."""
        expected = torch.load(path)
        sharded = {
            name: value.chunk(self.tp[1], dim=dim["tp"])[self.tp[0]]
            for name, value in expected.items()
            if (dim := self.placed.get(name))
        }
        return distances(self.found, {**expected, **sharded}, scales(expected))


def scales(expected: Mapping[str, Tensor]) -> dict[str, float]:
    """What an error of each observation is measured by: its norm, or a bit of the largest's."""
    norms = {name: float(value.norm()) for name, value in expected.items()}
    largest = max((norm for name, norm in norms.items() if name.startswith("grad.")), default=0.0)
    return {
        name: max(norm, TINY * largest) if name.startswith("grad.") else norm
        for name, norm in norms.items()
    }


def distances(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], scale: Mapping[str, float]
) -> dict[str, float]:
    """Relative L2 distances; infinite for what only one side has, and for NaN."""
    result = dict.fromkeys(found.keys() ^ expected.keys(), float("inf"))
    for name in found.keys() & expected.keys():
        if found[name].shape != expected[name].shape:
            result[name] = float("inf")
            continue
        error = float((found[name] - expected[name]).norm())
        result[name] = float("inf") if math.isnan(error) else error / max(scale[name], 1e-300)
    return result


def setup(rank: worlds.TestRank, directory: Path) -> RankOfExamples:
    """What a pool runs on each rank; ``directory`` holds a ``checkpoint``."""
    return RankOfExamples(rank, directory)


def measure(
    pool: Pool, oracle: Trainer, example: Example, *, fault: str | None = None
) -> dict[str, float]:
    """The largest distance of each observation over all ranks; the oracle runs beside them.

    Raises:
        RankError: a rank raised, ended or hung.
    """
    pool.begin(("run", (example, fault)))
    path = pool.directory / f"expected-{pool.topology}"
    try:
        torch.save(expected_of(oracle, example), path)
    except BaseException:
        pool.close()
        raise
    pool.finish()
    answers = pool.ask(("compare", str(path)))
    return {name: max(one.get(name, 0.0) for one in answers) for one in answers for name in one}


def as_case(example: Example, *, rightly_zero: tuple[str, ...] = ()) -> str:
    """Python source of a parity case of ``example``, to be pasted into a module of ``cases/``.

    Gradients that are ``rightly_zero`` are left out: they could not fail.
    """
    plan = example.plan if isinstance(example.plan, str) else [list(one) for one in example.plan]
    only = {"attention": example.attention, "attention_block": example.block}
    lines = [
        "from __future__ import annotations",
        "",
        *(["import zlib"] if example.slot else []),
        "from typing import TYPE_CHECKING",
        "",
        "import pytest",
        "import torch",
        "",
        "from cases.material import AGAINST_ORACLE",
        "from subjects.types import ForwardInput",
        "",
        "if TYPE_CHECKING:",
        "    from cases.conftest import BuildTrainer",
        "    from shardproof import Rank",
        "",
        "",
        *(_FACTOR.splitlines() if example.slot else []),
        f'@pytest.mark.parity("{example.topology}", **AGAINST_ORACLE)',
        "def test_found_by_properties(rank: Rank, build: BuildTrainer) -> None:",
        '    """An example that the property tests found; say here what it shows."""',
        *_assigned("documents", [list(one) for one in example.documents]),
        *_assigned("targets", [list(one) for one in example.targets] if example.asks else None),
        *_assigned("chosen", list(example.chosen)),
        *_assigned("plan", plan),
        *_assigned("rightly_zero", sorted(rightly_zero)),
        f"    trainer = build(sharing={example.sharing!r}, plan=plan, only={only!r})",
        *_slot_made(example.slot),
        "    tokens = [torch.tensor(document) for document in documents]",
        "    wanted = None if targets is None else torch.tensor(targets)",
        f"    asked = ForwardInput(tokens, wanted, hidden_states=True, slot={example.slot!r})",
        "    output = trainer.forward(asked)",
        "    states, logprobs = output.hidden_states, output.target_logprobs",
        "    assert states is not None",
        '    rank.observe("hidden_states", states)',
        "    weight = 0.5 + (torch.arange(len(states), dtype=states.dtype) * 7 % 11) / 11",
        "    loss = (states[chosen].square().mean(1) * weight[chosen]).sum()",
        "    if logprobs is not None:",
        '        rank.observe("logprobs", logprobs)',
        "        loss = loss - (logprobs * weight[:, None]).sum()",
        "    loss.backward()",
        "    gradients = list(trainer.named_gradients())",
        "    rank.observe_gradients(one for one in gradients if one[0] not in rightly_zero)",
        "",
    ]
    return "\n".join(lines)


_FACTOR = """
def factor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shape}".encode()))
    bound: float = shape[1] ** -0.5
    return torch.randn(shape, generator=generator, dtype=torch.float64) * bound


""".lstrip()


def _slot_made(slot: str | None) -> list[str]:
    if slot is None:
        return []
    options = ", ".join(f"{name}={value!r}" for name, value in SLOTS[slot].items())
    return [f"    trainer.add_slot({slot!r}, {options}, factory=factor)"]


def _assigned(name: str, value: object) -> list[str]:
    text = pprint.pformat(value, width=88, compact=True).splitlines()
    if len(text) == 1:
        return [f"    {name} = {text[0]}"]
    return [f"    {name} = (", *(f"        {line}" for line in text), "    )"]
