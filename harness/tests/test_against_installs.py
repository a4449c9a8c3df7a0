"""However the subject is installed and imported, ``--against`` puts the other code under test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.against_support import (
    CASE,
    GATHERED,
    LOCAL_ROWS,
    cells_of,
    commit,
    conclusions,
    dedent,
    git,
    state,
    write,
)

HARNESS = Path(__file__).resolve().parents[1]
PROJECT = """
    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"

    [project]
    name = "{name}"
    version = "1.0"

    [tool.hatch.build]
    dev-mode-exact = {exact}

    [tool.hatch.build.targets.wheel]
    packages = ["src/{name}"]
"""
SITE = """
    import site
    site.addsitedir({folder!r})
"""


def editable(root: Path, target: Path, *, name: str, exact: bool) -> Path:
    """Install a project as an editable one; return a folder that activates it from PYTHONPATH."""
    text = PROJECT.format(name=name, exact=str(exact).lower())
    write(root, {"pyproject.toml": text})
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [
            *pip,
            *("install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"),
            *("--prefix", str(target), "--editable", str(root)),
        ],
        env={**os.environ, "PIP_NO_WARN_SCRIPT_LOCATION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = target.rglob("site-packages")
    activated = target / "activated"
    write(activated, {"sitecustomize.py": dedent(SITE).format(folder=str(folder))})
    return activated


def run(root: Path, path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, with a folder on its PYTHONPATH."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(HARNESS)])}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


def test_editable_installs_by_a_finder_and_by_path(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    """A package that a finder maps, and a namespace with a part of the checkout.

    The finder knows nothing of the worktree; the root conftest puts the checkout first and imports
    the package at collection, and the ini has it preloaded. Of the namespace, ``space.theirs`` is
    installed elsewhere.
    """
    conftest = """
        import sys
        from pathlib import Path

        import mine

        FOUND = mine.__file__
        sys.path.insert(0, str(Path(__file__).parent / "one/src"))
    """
    by_finder = dedent(CASE.format(module="mine")).replace(
        "import torch\n", "import torch\nimport mine\n"
    )
    by_finder += """
    from conftest import FOUND
    assert mine.SIDE == "here", FOUND
"""
    by_path = dedent(CASE.format(module="space.mine")).replace(
        "    x = torch", "    from space.theirs import SCALE\n\n    x = SCALE * torch"
    )
    ini = """
        [pytest]
        shardproof_subject = one/src/mine two/src/space
        shardproof_preload = mine json
    """
    side = "SIDE = {!r}\n"
    commit(
        pytester.path,
        {
            "pytest.ini": ini,
            "conftest.py": conftest,
            "one/src/mine/__init__.py": dedent(LOCAL_ROWS) + side.format("there"),
            "two/src/space/mine.py": LOCAL_ROWS,
        },
    )
    write(
        pytester.path,
        {
            "one/src/mine/__init__.py": dedent(GATHERED) + side.format("here"),
            "two/src/space/mine.py": GATHERED,
            "test_finder.py": by_finder,
            "test_path.py": by_path.replace("test_gather", "test_namespace"),
        },
    )
    site = tmp_path / "site"
    editable(pytester.path / "one", site, name="mine", exact=True)
    path = editable(pytester.path / "two", site, name="space", exact=False)
    assert list(site.rglob("_editable_impl_mine.py"))
    assert str(pytester.path / "two/src") in {
        pth.read_text().strip() for pth in site.rglob("*.pth")
    }
    write(path, {"space/theirs.py": "SCALE = 3"})
    before = state(pytester.path)
    done = run(pytester.path, path, "--against", "HEAD")
    assert done.returncode == 0, done.stdout + done.stderr
    cells = cells_of(pytester.path)
    assert conclusions(pytester.path) == {
        "test_gather cp2": "caught",
        "test_namespace cp2": "caught",
    }
    # By the case's own assertion, which the reference makes first: it saw the other module.
    there = cells["test_gather cp2"]["against"]["there"]
    assert there["how"] == "assertion"
    assert "HEAD:one/src/mine/__init__.py" in there["text"]
    assert "rank-local rows returned" in cells["test_namespace cp2"]["against"]["there"]["text"]
    assert state(pytester.path) == before


def test_cases_in_the_subject_s_own_package(pytester: pytest.Pytester) -> None:
    """Its folder of tests is today's, with fixtures of a conftest file beside the code.

    Where all is committed and caught, the run goes well.
    """
    ini = "[pytest]\npythonpath = src\nshardproof_subject = src/mine\n"
    tests = {
        "src/mine/conftest.py": "import pytest\n@pytest.fixture\ndef today():\n    return 1\n",
        "src/mine/tests/__init__.py": "",
        "src/mine/tests/test_it.py": CASE.format(module="mine").replace(
            "(rank)", "(rank, today)", 1
        ),
    }
    commit(pytester.path, {"pytest.ini": ini, "src/mine/__init__.py": LOCAL_ROWS})
    git(pytester.path, "tag", "old")
    commit(pytester.path, {"src/mine/__init__.py": GATHERED, **tests}, "mended")
    result = pytester.runpytest("-p", "no:cacheprovider", "--against", "old")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["shardproof: against old (*) 'parent', subject: src/mine"])
    assert "uncommitted" not in result.stdout.str()
    assert conclusions(pytester.path) == {"test_gather cp2": "caught"}
    assert git(pytester.path, "worktree", "list").count("\n") == 0
