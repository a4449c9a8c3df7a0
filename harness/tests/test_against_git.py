"""What ``--against`` refuses before any rank starts, and what it leaves of a repository: all."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.against_support import CASE, GATHERED, LOCAL_ROWS, commit, git, state, write

from shardproof.against.git import Worktree, find_revision

HARNESS = Path(__file__).resolve().parents[1]
INI = "[pytest]\npythonpath = .\nshardproof_subject = mine\n"
FILES = {
    "pytest.ini": INI,
    "mine/__init__.py": LOCAL_ROWS,
    "test_case.py": CASE.format(module="mine"),
}


@pytest.fixture
def repository(pytester: pytest.Pytester) -> Path:
    """A parent, and a checkout that differs from it."""
    commit(pytester.path, FILES)
    git(pytester.path, "tag", "v1.0")
    git(pytester.path, "branch", "feature/rings")
    commit(pytester.path, {"mine/__init__.py": GATHERED}, "mended")
    return pytester.path


def no_git(root: Path) -> None:
    (root / ".git").rename(root / "no-git")


def shallow(root: Path) -> None:
    (root / ".git" / "shallow").write_text(git(root, "rev-parse", "HEAD") + "\n")


def linked(root: Path) -> None:
    (root / "mine").rename(root / "real")
    (root / "mine").symlink_to(root / "real")


def case_inside(root: Path) -> None:
    (root / "test_case.py").rename(root / "mine" / "test_case.py")


def ini(text: str) -> Callable[[Path], None]:
    return lambda root: write(root, {"pytest.ini": f"[pytest]\npythonpath = .\n{text}"})


def nothing(_root: Path) -> None:
    """Leave the repository as it is."""


@pytest.mark.parametrize(
    ("change", "args", "says"),
    [
        (no_git, ["--against", "HEAD~1"], "is in no git repository that can be read"),
        (nothing, ["--against", "v1.1"], "git knows no commit by that name; near it: v1.0"),
        (nothing, ["--against", "rings"], "near it: feature/rings"),
        (nothing, ["--against", "xyzzy"], "git log --oneline lists commits"),
        (nothing, ["--against", "HEAD:mine"], "git knows no commit by that name"),
        (nothing, ["--against="], "expected a revision or 'package==1.2.3', got nothing"),
        (shallow, ["--against", "HEAD~1"], "this is a shallow clone, and 'HEAD~1' is not among"),
        (ini(""), ["--against", "v1.0"], "shardproof_subject = src/mytrainer"),
        (ini("shardproof_subject = new\n"), ["--against", "v1.0"], "there is no 'new'"),
        (ini("shardproof_subject = ../up\n"), ["--against", "v1.0"], "paths below the rootdir"),
        (ini("shardproof_subject = .\n"), ["--against", "v1.0"], "paths below the rootdir"),
        (ini("shardproof_subject = /tmp\n"), ["--against", "v1.0"], "paths below the rootdir"),
        (ini("shardproof_subject = pytest.ini\n"), ["--against", "v1.0"], "and Python modules"),
        (linked, ["--against", "v1.0"], "behind a symbolic link; declare where it leads"),
        (case_inside, ["--against", "v1.0"], "mine/test_case.py holds cases, and mine"),
        (nothing, ["--against", "v1.0", "-k", "none_such"], "no parity case is selected"),
        (nothing, ["--against", "v1.0", "-n", "2"], "can't be used with pytest-xdist"),
        (nothing, ["--against", "mine==1.*"], "expected one version, 'package==1.2.3'"),
        (nothing, ["--against", "mine==1,==2"], "expected one version, 'package==1.2.3'"),
        (nothing, ["--against", "mine[extra]==1.0"], "without extras or markers"),
    ],
)
def test_refused_before_any_rank_starts(
    pytester: pytest.Pytester,
    repository: Path,
    change: Callable[[Path], None],
    args: list[str],
    says: str,
) -> None:
    change(repository)
    result = pytester.runpytest("-p", "no:cacheprovider", *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert says in " ".join((result.stderr.str() + result.stdout.str()).split())
    assert not (repository / "reports").exists()


def test_a_path_that_the_revision_lacks(pytester: pytest.Pytester, repository: Path) -> None:
    commit(repository, {"other/__init__.py": "", "pytest.ini": INI.replace("mine", "mine other")})
    result = pytester.runpytest("--against", "HEAD~1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "other (shardproof_subject) is not in" in result.stderr.str()


def test_no_program_git(
    pytester: pytest.Pytester, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(repository))
    result = pytester.runpytest("--against", "HEAD~1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "there is no program 'git' on PATH" in result.stderr.str()


def test_a_real_shallow_clone(pytester: pytest.Pytester, repository: Path) -> None:
    clone = pytester.path / "clone"
    source = repository.resolve().as_uri()
    git(repository, "clone", "--quiet", "--depth=1", source, str(clone))
    result = pytester.runpytest("--rootdir", str(clone), str(clone), "--against", "HEAD~1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "git fetch --unshallow" in result.stderr.str()


def test_collecting_alone_needs_nothing(pytester: pytest.Pytester, repository: Path) -> None:
    result = pytester.runpytest("--against", "no-such", "--collect-only", "-q")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["test_case.py::test_gather[[]cp2[]]"])


class TestRevision:
    def test_changes_in_the_subject_alone_are_told(self, repository: Path) -> None:
        write(repository, {"mine/__init__.py": LOCAL_ROWS, "mine/new.py": "", "other.txt": "x"})
        revision = find_revision(repository, "v1.0", ["mine"])
        assert revision.changed == ("mine/__init__.py", "mine/new.py")
        assert revision.summary == "parent"

    def test_a_revision_without_a_difference_is_known(self, repository: Path) -> None:
        assert find_revision(repository, "HEAD~1", ["mine"]).differing == ("mine/__init__.py",)
        assert not find_revision(repository, "HEAD", ["mine"]).differing
        commit(repository, {"README": "no code"})
        os.utime(repository / "mine/__init__.py", (1, 1))
        assert not find_revision(repository, "HEAD~1", ["mine"]).differing
        write(repository, {"mine/new.py": ""})
        assert find_revision(repository, "HEAD~1", ["mine"]).differing == ("mine/new.py",)

    def test_a_root_below_the_top_of_its_repository(self, repository: Path) -> None:
        commit(repository, {"part/mine/__init__.py": "SIDE = 1"})
        revision = find_revision(repository / "part", "HEAD", ["mine"])
        assert revision.prefix == "part/"
        worktree = Worktree(revision)
        worktree.make()
        try:
            assert (worktree.root / "mine/__init__.py").read_text() == "SIDE = 1\n"
        finally:
            worktree.remove()


class TestWorktree:
    @pytest.fixture(autouse=True)
    def own_temporary_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "temporary"
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setenv("TMPDIR", str(folder))
        return folder

    def test_nothing_of_the_repository_changes(
        self, repository: Path, own_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Index, stash, branches, reflog and hooks; also where a hook of git runs pytest."""
        write(repository, {"mine/__init__.py": "stashed"})
        git(repository, "stash")
        write(repository, {"mine/__init__.py": "staged", "mine/part.py": ""})
        git(repository, "add", "mine")
        write(repository, {"mine/__init__.py": "dirty"})
        hook = repository / ".git/hooks/post-checkout"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\ntouch hook-was-here\n")
        hook.chmod(0o755)
        # Its time differs and its content does not: a refreshed index would be written.
        os.utime(repository / "mine/part.py", (1, 1))
        before = state(repository)
        monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git/index"))
        monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
        revision = find_revision(repository, "v1.0", ["mine"])
        worktree = Worktree(revision)
        worktree.make()
        assert "return x[rows]" in (worktree.root / "mine/__init__.py").read_text()
        worktree.remove()
        monkeypatch.delenv("GIT_INDEX_FILE")
        monkeypatch.delenv("GIT_DIR")
        assert state(repository) == before
        assert (repository / "mine/__init__.py").read_text() == "dirty\n"
        assert not list(own_temporary_folder.iterdir())
        assert not list(own_temporary_folder.rglob("hook-was-here"))
        worktree.remove()

    def test_what_a_dead_run_left_is_removed_by_the_next(
        self, repository: Path, own_temporary_folder: Path
    ) -> None:
        before = state(repository)
        program = (
            "import os, sys; from pathlib import Path\n"
            "from shardproof.against.git import Worktree, find_revision\n"
            "Worktree(find_revision(Path(sys.argv[1]), 'v1.0', ['mine'])).make()\n"
            "os._exit(9)\n"
        )
        command = [sys.executable, "-c", program, str(repository)]
        env = {**os.environ, "PYTHONPATH": str(HARNESS)}
        done = subprocess.run(command, env=env, check=False)
        assert done.returncode == 9
        assert list(own_temporary_folder.iterdir())
        assert state(repository) != before
        worktree = Worktree(find_revision(repository, "v1.0", ["mine"]))
        worktree.make()
        worktree.remove()
        assert not list(own_temporary_folder.iterdir())
        assert state(repository) == before

    def test_worktrees_of_the_user_are_left_alone(self, repository: Path, tmp_path: Path) -> None:
        """Also those whose folder is missing at present: a disk may not be mounted."""
        git(repository, "worktree", "add", "--quiet", str(tmp_path / "mine"), "feature/rings")
        (tmp_path / "mine").rename(tmp_path / "away")
        before = state(repository)
        worktree = Worktree(find_revision(repository, "v1.0", ["mine"]))
        worktree.make()
        worktree.remove()
        assert state(repository) == before
