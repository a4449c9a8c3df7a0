"""What a noise run costs beside a plain run, on one Qwen3 layer of the 0.6B model's widths.

Prints the ratio of time and of peak memory for forward and backward, and exits with 1 when the
limits are exceeded: 4 times the time, 1.5 times the memory. The weights are random and made here.

    python ci/noise_cost.py [--tokens 64] [--repeats 3] [--dtype float32 --dtype float64]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "harness"))

import torch

from shardproof.noise import NoiseMode

TIME_LIMIT: Final = 4.0
MEMORY_LIMIT: Final = 1.5
DTYPES: Final = ("float32", "float64")


def make_model(dtype: torch.dtype) -> Any:
    """One Qwen3 layer with the widths and the vocabulary of the 0.6B model, random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        tie_word_embeddings=True,
        dtype=dtype,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def step(model: Any, ids: torch.Tensor, *, noise: bool) -> float:
    """Forward and backward once; seconds."""
    model.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    with NoiseMode(1) if noise else contextlib.nullcontext():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return time.perf_counter() - begin


def measure(what: str, dtype: torch.dtype, tokens: int, repeats: int) -> dict[str, float]:
    """Run in a process of its own: ``what`` is plain or noise (peak memory) or both (time)."""
    model = make_model(dtype)
    ids = torch.randint(0, 151936, (1, tokens), generator=torch.Generator().manual_seed(1))
    if what != "both":
        step(model, ids, noise=what == "noise")
        return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
    seconds: dict[str, list[float]] = {"plain": [], "noise": []}
    for _ in range(repeats + 1):
        for kind, found in seconds.items():
            found.append(step(model, ids, noise=kind == "noise"))
    # The first round warms up; the least of the others is what other load disturbed least.
    return {kind: min(found[1:]) for kind, found in seconds.items()}


def child(what: str, dtype: str, tokens: int, repeats: int) -> dict[str, float]:
    """``measure`` in a fresh process."""
    command = [sys.executable, __file__, "--measure", what, "--dtype", dtype]
    command += ["--tokens", str(tokens), "--repeats", str(repeats)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit status whether the limits are kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--measure", choices=("plain", "noise", "both"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    dtypes = options.dtype or list(DTYPES)
    if options.measure:
        dtype = getattr(torch, dtypes[0])
        print(json.dumps(measure(options.measure, dtype, options.tokens, options.repeats)))
        return 0
    kept = True
    print(
        f"{'dtype':8} {'plain s':>8} {'noise s':>8} {'ratio':>6} {'GiB':>6} {'GiB':>6} {'ratio':>6}"
    )
    for name in dtypes:
        seconds = child("both", name, options.tokens, options.repeats)
        plain, noise = (
            child(kind, name, options.tokens, 1)["bytes"] / 2**30 for kind in ("plain", "noise")
        )
        slower, larger = seconds["noise"] / seconds["plain"], noise / plain
        kept = kept and slower <= TIME_LIMIT and larger <= MEMORY_LIMIT
        print(
            f"{name:8} {seconds['plain']:8.2f} {seconds['noise']:8.2f} {slower:6.2f}"
            f" {plain:6.2f} {noise:6.2f} {larger:6.2f}"
        )
    print(f"limits: time {TIME_LIMIT}, memory {MEMORY_LIMIT}: {'kept' if kept else 'EXCEEDED'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
