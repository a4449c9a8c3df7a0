"""Repositories with a parent and a checkout, for the tests of ``--against``."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IDENTITY = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Tester"), ("EMAIL", "tester@example.invalid"))
}

LOCAL_ROWS = """
    def gather(rank, x, rows):
        return x[rows]
"""
"""A parent that returns the rows of its rank."""

GATHERED = """
    import torch
    import torch.distributed as dist

    def gather(rank, x, rows):
        whole = torch.zeros_like(x)
        whole[rows] = x[rows]
        if not rank.is_reference:
            dist.all_reduce(whole, group=rank.group("cp"))
        return whole
"""
"""The same with all rows in source order on every rank."""

CASE = """
    import pytest
    import torch

    @pytest.mark.parity("cp2", fixes="#911")
    def test_gather(rank):
        from {module} import gather

        x = torch.randn(11, 8, generator=rank.generator("x"), dtype=rank.dtype)
        rank.observe("hidden", gather(rank, x, rank.rows(11)))
"""
"""A case that catches it."""


def git(root: Path, *args: str) -> str:
    """Run git and return what it printed."""
    done = subprocess.run(
        ["git", "-C", str(root), *args],
        env={**os.environ, **IDENTITY},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def dedent(text: str) -> str:
    """Sources without the margin of the constants above."""
    lines = text.splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[margin:] for line in lines).strip() + "\n"


def write(root: Path, files: Mapping[str, str]) -> None:
    """Write files below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")


def commit(root: Path, files: Mapping[str, str], message: str = "parent") -> str:
    """Write and commit files in a repository, made where there is none; return the commit."""
    write(root, files)
    if not (root / ".git").exists():
        git(root, "init", "--quiet", "--initial-branch=main")
        write(root, {".gitignore": "reports\n__pycache__\n.pytest_cache\n"})
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(root, "rev-parse", "HEAD")


def state(root: Path) -> tuple[str, ...]:
    """All of a repository that a control must leave alone, to be compared."""
    return (
        git(root, "for-each-ref"),
        git(root, "stash", "list"),
        git(root, "worktree", "list"),
        git(root, "reflog"),
        git(root, "--no-optional-locks", "status", "--porcelain", "--untracked-files=all"),
        (root / ".git" / "HEAD").read_text(),
        (root / ".git" / "index").read_bytes().hex(),
        *(f"{path}: {path.read_bytes().hex()}" for path in _contents(root)),
        str(sorted(path.name for path in (root / ".git").iterdir() if path.name != "worktrees")),
    )


def _contents(root: Path) -> list[Path]:
    names = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    return [root / name for name in sorted(set(names)) if (root / name).is_file()]


def cells_of(root: Path) -> dict[str, dict[str, Any]]:
    """The results of a run by case and topology."""
    lines = (root / "reports/latest/run.jsonl").read_text("utf-8").splitlines()
    cells = [json.loads(line) for line in lines[1:]]
    return {f"{cell['case'].partition('::')[2]} {cell['topology']}": cell for cell in cells}


def conclusions(root: Path) -> dict[str, str]:
    """What each cell of a run came to."""
    return {name: cell["against"]["conclusion"] for name, cell in cells_of(root).items()}
