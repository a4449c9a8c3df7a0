"""`ci/diagnostics` finds what a change brings, and nothing that was there or has moved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.tests.programs import program

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """\
[tool.ruff]
lint.select = ["F", "E711"]

[tool.mypy]
strict = true
"""
OLD = """\
import os


def size(x: int) -> str:
    return x


def none(x: object) -> bool:
    return x == None
"""


def git(root: Path, *args: str) -> str:
    identity = ("-c", "user.name=Tester", "-c", "user.email=tester@example.invalid")
    command = ["git", "-C", str(root), *identity, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three diagnostics of ruff and mypy, committed."""
    root = tmp_path / "repository"
    (root / "src").mkdir(parents=True)
    (root / "pyproject.toml").write_text(CONFIG)
    (root / "src/old.py").write_text(OLD)
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", "parent")
    return root


def run(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "ci/diagnostics"), "--root", str(root), *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "harness")}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_moved_lines_are_not_new_and_what_is_new_fails(repository: Path) -> None:
    source = repository / "src/old.py"
    source.write_text("# a line\n" * 9 + OLD.replace("x == None", "x is None"))
    done = run(repository, "HEAD", "--types", "src", "gone")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "diagnostics: 3 before, 2 now; 0 new, 1 gone\n"
    source.write_text(OLD.replace("import os\n", "import os\nimport sys\n"))
    added = "def text(y: str) -> int:\n    return y\n"
    (repository / "src/added.py").write_text(added)
    before = git(repository, "worktree", "list")
    done = run(repository, "HEAD", "--types", "src")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [
        'src/added.py:2: return-value Incompatible return value type (got "str", expected "int")',
        "src/old.py:2: F401 `sys` imported but unused",
        "diagnostics: 3 before, 5 now; 2 new, 0 gone",
    ]
    assert git(repository, "worktree", "list") == before


def test_two_revisions_and_one_that_is_not_there(repository: Path) -> None:
    (repository / "src/old.py").write_text(OLD + "\n\nimport sys\n")
    git(repository, "commit", "--quiet", "-am", "later")
    (repository / "src/old.py").write_text("")
    done = run(repository, "HEAD~1", "HEAD", "--types", "src")
    assert done.returncode == 1
    assert "1 new, 0 gone" in done.stdout
    done = run(repository, "mian")
    assert done.returncode == 2
    assert "near it: main" in done.stderr


def test_a_tool_that_cannot_run_is_no_pass(repository: Path) -> None:
    (repository / "pyproject.toml").write_text('[tool.ruff]\nlint.select = ["NO-SUCH"]\n')
    done = run(repository, "HEAD")
    assert done.returncode == 2
    assert "diagnostics: ruff, in " in done.stderr


class TestComparison:
    def test_each_one_counts(self) -> None:
        """A second diagnostic like the first is new; the same one in another file too."""
        module = program("diagnostics")
        tree = Path("/tree")

        def one(file: str, line: int, message: str = "unused") -> object:
            return module.found(tree, file, "F401", message, line)

        before = [one("/tree/a.py", 3)]
        assert not module.new(before, [one("/tree/a.py", 8)])
        assert module.new(before, [one("/tree/a.py", 3), one("/tree/a.py", 4)]).total() == 1
        assert module.new(before, [one("/tree/b.py", 3)]).total() == 1
        assert module.new(before, [one("/tree/a.py", 3, "other")]).total() == 1
        (line, _) = module.report(before, [one("/tree/a.py", 3), one("/tree/a.py", 4)])
        assert line == "a.py:3,4: F401 unused (1 of them known)"

    def test_lines_in_a_message_move_with_it(self) -> None:
        module = program("diagnostics")
        first = module.found(Path("/a"), "x.py", "no-redef", "already defined on line 3", 9)
        second = module.found(Path("/b"), "x.py", "no-redef", "already defined on line 5", 11)
        assert not module.new([first], [second])
