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
    packages = [{packages}]
"""
SITE = """
    import site
    site.addsitedir({folder!r})
"""


def editable(root: Path, target: Path, *, packages: str, exact: bool) -> Path:
    """Install a project as an editable one; return a folder that activates it from PYTHONPATH."""
    text = PROJECT.format(name="mine", packages=packages, exact=str(exact).lower())
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


def test_an_editable_install_by_a_finder(pytester: pytest.Pytester, tmp_path: Path) -> None:
    """The finder knows nothing of the worktree. The root conftest puts the checkout first and
    imports the subject at collection, and the ini has it preloaded."""
    conftest = """
        import sys
        from pathlib import Path

        import mine

        FOUND = mine.__file__
        sys.path.insert(0, str(Path(__file__).parent / "src"))
    """
    case = (
        dedent(CASE.format(module="mine"))
        + """
    from conftest import FOUND
    if not rank.is_reference:
        (rank.case_dir / "found").write_text(FOUND)
    assert mine.SIDE == "here", FOUND
"""
    )
    case = case.replace("import torch\n", "import torch\nimport mine\n", 1)
    ini = "[pytest]\nshardproof_subject = src/mine\nshardproof_preload = mine json\n"
    side = "SIDE = {!r}\n"
    commit(
        pytester.path,
        {
            "pytest.ini": ini,
            "src/mine/__init__.py": dedent(LOCAL_ROWS) + side.format("there"),
            "conftest.py": conftest,
        },
    )
    write(
        pytester.path,
        {"src/mine/__init__.py": dedent(GATHERED) + side.format("here"), "test_it.py": case},
    )
    path = editable(pytester.path, tmp_path / "site", packages='"src/mine"', exact=True)
    assert list((tmp_path / "site").rglob("_editable_impl_mine.py"))
    before = state(pytester.path)
    done = run(pytester.path, path, "--against", "HEAD")
    assert done.returncode == 0, done.stdout + done.stderr
    assert conclusions(pytester.path) == {"test_gather cp2": "caught"}
    # By the case's own assertion, which the reference makes first: it saw the other module.
    there = cells_of(pytester.path)["test_gather cp2"]["against"]["there"]
    assert there["how"] == "assertion"
    assert "HEAD:src/mine/__init__.py" in there["text"]
    assert state(pytester.path) == before


def test_an_editable_install_by_path_of_a_namespace(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    """space.mine is a part of the checkout, space.theirs one that is installed elsewhere."""
    case = dedent(CASE.format(module="space.mine")).replace(
        "    x = torch", "    from space.theirs import SCALE\n\n    x = SCALE * torch"
    )
    ini = "[pytest]\nshardproof_subject = src/space\n"
    source = "src/space/mine.py"
    commit(pytester.path, {"pytest.ini": ini, source: LOCAL_ROWS})
    write(pytester.path, {source: GATHERED, "test_it.py": case})
    path = editable(pytester.path, tmp_path / "site", packages='"src/space"', exact=False)
    (pth,) = (tmp_path / "site").rglob("*.pth")
    assert pth.read_text().strip() == str(pytester.path / "src")
    write(path, {"space/theirs.py": "SCALE = 3"})
    done = run(pytester.path, path, "--against", "HEAD")
    assert done.returncode == 0, done.stdout + done.stderr
    assert conclusions(pytester.path) == {"test_gather cp2": "caught"}
    there = cells_of(pytester.path)["test_gather cp2"]["against"]["there"]
    assert "rank-local rows returned" in there["text"]


def test_what_the_interpreter_imports_as_it_starts_is_found(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    """No finder can be earlier than sitecustomize: the run stops."""
    ini = "[pytest]\npythonpath = src\nshardproof_subject = src/mine\n"
    commit(pytester.path, {"pytest.ini": ini, "src/mine/__init__.py": LOCAL_ROWS})
    write(
        pytester.path,
        {"src/mine/__init__.py": GATHERED, "test_it.py": CASE.format(module="mine")},
    )
    source = str(pytester.path / "src")
    early = f"import sys\nsys.path.insert(0, {source!r})\nimport mine\n"
    write(tmp_path / "early", {"sitecustomize.py": early})
    done = run(pytester.path, tmp_path / "early", "--against", "HEAD")
    assert done.returncode == 1
    assert "wrong code under test: there, on rank 0" in done.stdout
    assert f"mine was imported from {source}/mine/__init__.py" in done.stdout


def test_cases_in_the_subject_s_own_package(pytester: pytest.Pytester) -> None:
    """Its folder of tests is today's, with fixtures of a conftest file beside the code."""
    ini = "[pytest]\npythonpath = src\nshardproof_subject = src/mine\n"
    tests = {
        "src/mine/conftest.py": "import pytest\n@pytest.fixture\ndef today():\n    return 1\n",
        "src/mine/tests/__init__.py": "",
        "src/mine/tests/test_it.py": CASE.format(module="mine").replace(
            "(rank)", "(rank, today)", 1
        ),
    }
    commit(pytester.path, {"pytest.ini": ini, "src/mine/__init__.py": LOCAL_ROWS})
    write(pytester.path, {"src/mine/__init__.py": GATHERED, **tests})
    result = pytester.runpytest("-p", "no:cacheprovider", "--against", "HEAD")
    assert result.ret == 0
    assert conclusions(pytester.path) == {"test_gather cp2": "caught"}
    assert git(pytester.path, "worktree", "list").count("\n") == 0
