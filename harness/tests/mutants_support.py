"""A package to be read, and what is found in it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

from shardproof.mutants.reading import read_sites

Write = Callable[..., list[str]]


def found_in(folder: Path, source: str = "", **others: str) -> list[str]:
    """Write modules of a package ``mine``; line, kind, name and function of what is found."""
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine/__init__.py").touch()
    for name, text in {"code": source, **others}.items():
        (folder / f"mine/{name}.py").write_text(textwrap.dedent(text))
    sites = read_sites(["mine"], folder)
    assert {site.file for site in sites} <= {f"mine/{one}.py" for one in ("code", *others)}
    return [f"{one.line} {one.kind} {one.name} in {one.function}" for one in sites]


OPS = """\
    import torch.distributed as dist

    def add(x):
        return run(x, lambda y: dist.all_reduce(y))

    def run(x, call):
        call(x)
        return x

    class Comm:
        def __init__(self, x):
            dist.barrier()

        def __call__(self, x):
            return self.gather(x)

        def gather(self, x):
            def inner():
                dist.all_gather([], x)
            inner()

        @classmethod
        def send(cls, x):
            dist.send(x, 0)
            cls.both(x)

        @staticmethod
        def both(x):
            Comm.send(x)
            dist.recv(x)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            dist.reduce(x, 0)

        @staticmethod
        def backward(ctx, x):
            return x

    more = add
"""
