"""A revision's files, by ``git worktree`` in a private folder; nothing of the user's is touched."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.fleet.cleanup import make_scratch, remove_scratch

# A hook of git runs pytest with these set, to the index that is being committed for one.
_REPOSITORY_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_PREFIX",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_IMPLICIT_WORK_TREE",
)
_SCRATCH_MARK = f"/shardproof-{os.getuid()}-"
_NEAR = 5


class AgainstError(Exception):
    """What was asked for can't be run against; the text says what to do."""


@dataclass(frozen=True)
class Revision:
    """A commit of the repository around ``root``.

    ``text`` is what the user wrote, ``prefix`` the path of ``root`` in the repository (empty at its
    top). ``changed`` are files in the declared paths that differ from the last commit, and
    ``differing`` those that differ from REV, untracked ones included in both.
    """

    text: str
    commit: str
    summary: str
    root: Path
    prefix: str
    changed: tuple[str, ...]
    differing: tuple[str, ...]


def find_revision(root: Path, text: str, paths: Sequence[str]) -> Revision:
    """Look a revision up, and see that it has the declared paths.

    Raises:
        AgainstError: no git, no repository, no such revision, or a path that it lacks.
    """
    if shutil.which("git") is None:
        raise AgainstError(
            f"--against {text}: a revision needs git, and there is no program 'git' on PATH; "
            "install it, or name a release ('package==1.2.3')"
        )
    top = run_git(root, "rev-parse", "--show-toplevel")
    if top.returncode != 0:
        raise AgainstError(
            f"--against {text}: {root} is in no git repository that can be read "
            f"({_said(top)}); run pytest in a checkout, or name a release ('package==1.2.3')"
        )
    prefix = run_git(root, "rev-parse", "--show-prefix").stdout.strip()
    commit = _commit(root, text)
    for path in paths:
        found = run_git(root, "cat-file", "-e", f"{commit}:{prefix}{path}")
        if found.returncode != 0:
            raise AgainstError(
                f"--against {text}: {path} (shardproof_subject) is not in {commit[:10]}; "
                "it may have had another name there: declare paths that both revisions have"
            )
    summary = run_git(root, "log", "-1", "--format=%s", commit).stdout.strip()
    status = run_git(root, "status", "--porcelain", "-z", "--untracked-files=all", "--", *paths)
    entries = [entry for entry in status.stdout.split("\0") if entry[2:3] == " "]
    changed = tuple(entry[3:] for entry in entries)
    tracked = run_git(root, "diff", "--name-only", "-z", commit, "--", *paths).stdout.split("\0")
    untracked = [entry[3:] for entry in entries if entry.startswith("??")]
    differing = tuple(name for name in [*tracked, *untracked] if name)
    return Revision(text, commit, summary, root, prefix, changed, differing)


def _commit(root: Path, text: str) -> str:
    asked = run_git(
        root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}"
    )
    if asked.returncode == 0 and asked.stdout.strip():
        return asked.stdout.strip()
    shallow = run_git(root, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    if shallow:
        raise AgainstError(
            f"--against {text}: this is a shallow clone, and {text!r} is not among the commits "
            "that it holds; fetch more of the history (git fetch --unshallow, or "
            "git fetch --deepen=50), or a branch by its name"
        )
    listed = run_git(root, "for-each-ref", "--format=%(refname:short)")
    names = [name for name in listed.stdout.split("\n") if name]
    tails = {name.rpartition("/")[2]: name for name in names}
    near = difflib.get_close_matches(text, [*names, *tails], n=_NEAR, cutoff=0.5)
    near = list(dict.fromkeys(tails.get(name, name) for name in near))
    hint = f"near it: {', '.join(near)}" if near else "git log --oneline lists commits"
    raise AgainstError(
        f"--against {text}: expected a branch, a tag or a commit of {root}, and git knows no "
        f"commit by that name; {hint}"
    )


class Worktree:
    """The whole of a revision in a private folder, until :meth:`remove`.

    Its folder is locked by this process, so that a later run can tell that a dead one left it.
    """

    def __init__(self, revision: Revision) -> None:
        self._revision = revision
        self._scratch: Path | None = None
        self.tree = Path()

    @property
    def root(self) -> Path:
        """What stands for the rootdir."""
        return self.tree / self._revision.prefix

    def make(self) -> None:
        """Check the revision out.

        Raises:
            AgainstError: git could not, with its own words.
        """
        root = self._revision.root
        self._scratch = make_scratch(root=Path(os.path.realpath(tempfile.gettempdir())))
        _forget_dead(root)
        self.tree = self._scratch / f"tree-{self._scratch.name}"
        # Hooks of the repository are for the user's own checkouts.
        quiet = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
        done = run_git(
            root,
            *quiet,
            "worktree",
            "add",
            "--quiet",
            "--detach",
            str(self.tree),
            self._revision.commit,
        )
        if done.returncode != 0:
            self.remove()
            raise AgainstError(
                f"--against {self._revision.text}: git could not make a worktree of "
                f"{self._revision.commit[:10]}: {_said(done)}"
            )

    def remove(self) -> None:
        """Remove the folder, and what git notes of it. May be called again."""
        if self._scratch is None:
            return
        _remove(self._revision.root, self.tree)
        remove_scratch(self._scratch)
        self._scratch = None


def _remove(root: Path, tree: Path) -> None:
    # Twice forced: also where an interrupted `worktree add` left it locked.
    run_git(root, "worktree", "remove", "--force", "--force", str(tree), shielded=True)


def _forget_dead(root: Path) -> None:
    """Remove what git notes of worktrees whose folders went away with a dead run."""
    listed = run_git(root, "worktree", "list", "--porcelain").stdout
    for line in listed.splitlines():
        tree = line.removeprefix("worktree ")
        if tree != line and _SCRATCH_MARK in tree and not Path(tree).exists():
            _remove(root, Path(tree))


def run_git(root: Path, *args: str, shielded: bool = False) -> subprocess.CompletedProcess[str]:
    """Run git on the repository around ``root``, whatever its variables say of another.

    ``shielded`` from the terminal's Ctrl-C, for cleaning up.
    """
    env = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    # Not even the index is refreshed; messages are in English, as ours are.
    env.update(GIT_OPTIONAL_LOCKS="0", LC_ALL="C", GIT_TERMINAL_PROMPT="0")
    return subprocess.run(
        ["git", "-C", str(root), *args],
        env=env,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.DEVNULL,
        check=False,
        start_new_session=shielded,
    )


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
