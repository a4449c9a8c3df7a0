"""``--against 'package==1.2.3'``: a release installed from a local folder, and cases run on it."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest
from tests.against_support import (
    CASE,
    GATHERED,
    LOCAL_ROWS,
    cells_of,
    conclusions,
    dedent,
    write,
)
from tests.plugin_support import read_run

from shardproof.against.git import AgainstError
from shardproof.against.release import Release, outermost, parse_release


def wheel(folder: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    """Write a wheel of pure Python; return its path."""
    info = f"{name}-{version}.dist-info"
    contents = {
        **{path: dedent(text) for path, text in files.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Requires-Dist: no-such-dependency\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = ""
    for member, text in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{member},sha256={digest.decode()},{len(text.encode())}\n"
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in contents.items():
            archive.writestr(member, text)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip may look at."""
    folder = tmp_path / "wheels"
    wheel(folder, "mine", "1.2.3", {"mine/__init__.py": LOCAL_ROWS, "mine/part.py": ""})
    wheel(folder, "mine", "1.3.0", {"mine/__init__.py": GATHERED})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


class TestRelease:
    def test_what_names_one(self) -> None:
        release = parse_release("My.Pack == 1.2.3rc1")
        assert release is not None
        assert (release.name, release.version) == ("My.Pack", "1.2.3rc1")
        assert parse_release("HEAD~1") is None
        assert parse_release("v1.2.3") is None

    @pytest.mark.parametrize("text", ["mine==1.*", "mine==1,<2", "mine===1", "mine[a]==1", "=="])
    def test_what_names_none(self, text: str) -> None:
        with pytest.raises(AgainstError, match="expected one version"):
            parse_release(text)

    def test_modules_are_the_outermost_packages(self) -> None:
        files = [
            *("mine/__init__.py", "mine/part.py", "mine/inner/__init__.py", "single.py"),
            *("space/mine/__init__.py", "space/mine/x.py", "space/alone.py", "not-a-name/x.py"),
            *("mine-1.0.dist-info/RECORD", "../../bin/tool", "mine/data.json"),
        ]
        assert outermost(PurePosixPath(file) for file in files) == [
            ("mine", PurePosixPath("mine")),
            ("single", PurePosixPath("single.py")),
            ("space.mine", PurePosixPath("space/mine")),
            ("space.alone", PurePosixPath("space/alone.py")),
        ]

    def test_a_module_inside_a_package_has_its_place(self, tmp_path: Path) -> None:
        write(tmp_path, {"mine/inner/__init__.py": "", "mine/part.py": "", "alone.py": ""})
        modules = {"mine": tmp_path / "mine", "alone": tmp_path / "alone.py"}
        assert Release.place(modules, "mine") == tmp_path / "mine"
        assert Release.place(modules, "mine.inner") == tmp_path / "mine/inner"
        assert Release.place(modules, "mine.part") == tmp_path / "mine/part.py"
        assert Release.place(modules, "alone") == tmp_path / "alone.py"
        assert Release.place(modules, "mine.gone") is None
        assert Release.place(modules, "other") is None

    def test_it_is_installed_once_without_dependencies_or_bytecode(
        self, tmp_path: Path, index: Path
    ) -> None:
        release = Release("mine==1.2.3", "mine", "1.2.3")
        folder = release.install(tmp_path / "releases")
        assert release.modules(folder) == {"mine": folder / "mine"}
        assert not list(folder.rglob("*.pyc"))
        for path in index.iterdir():
            path.unlink()
        assert release.install(tmp_path / "releases") == folder
        assert [path.name for path in (tmp_path / "releases").iterdir()] == [folder.name]

    @pytest.mark.parametrize("change", ["edited", "removed"])
    def test_a_kept_one_that_was_changed_is_installed_anew(
        self, tmp_path: Path, index: Path, change: str
    ) -> None:
        release = Release("mine==1.2.3", "mine", "1.2.3")
        file = release.install(tmp_path / "releases") / "mine/__init__.py"
        before = file.read_text()
        if change == "edited":
            file.write_text(before + "# tried something\n")
        else:
            file.unlink()
        release.install(tmp_path / "releases")
        assert file.read_text() == before

    def test_a_version_that_no_index_has(self, tmp_path: Path, index: Path) -> None:
        with pytest.raises(AgainstError) as caught:
            Release("mine==9", "mine", "9").install(tmp_path / "releases")
        assert "pip could not install mine 9" in str(caught.value)
        assert "1.2.3, 1.3.0" in str(caught.value)
        assert not list((tmp_path / "releases").iterdir())


def test_a_release_without_what_is_declared(pytester: pytest.Pytester, index: Path) -> None:
    wheel(index, "other", "1.0", {"other/__init__.py": ""})
    ini = "[pytest]\npythonpath = src\nshardproof_subject = src/mine\n"
    files = {
        "pytest.ini": ini,
        "src/mine/__init__.py": "",
        "test_it.py": CASE.format(module="mine"),
    }
    write(pytester.path, files)
    result = pytester.runpytest("--against", "other==1.0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = " ".join(result.stderr.str().split())
    # The rootdir is on the import path too, since the case lies in it.
    names = "src/mine (shardproof_subject) is imported as src.mine or mine"
    assert f"{names}, and other 1.0 installs other" in said


def test_cases_run_on_a_release(pytester: pytest.Pytester, index: Path) -> None:
    """No git, no ini setting: the release's modules are the subject; here is what is installed."""
    case = (
        dedent(CASE.format(module="mine"))
        + """
@pytest.mark.parity("cp2", fixes="#1")
def test_version(rank):
    import importlib.metadata
    version = "1.3.0" if rank.is_reference else importlib.metadata.version("mine")
    rank.observe("digits", torch.tensor([int(part) for part in version.split(".")]))
"""
    )
    write(pytester.path, {"test_it.py": case})
    here = Release("mine==1.3.0", "mine", "1.3.0").install(pytester.path / "installed")
    write(pytester.path, {"pytest.ini": f"[pytest]\npythonpath = {here}\n"})
    result = pytester.runpytest("--against", "mine==1.2.3")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "shardproof: against mine 1.2.3, subject: the modules of the release",
            "*rank-local rows returned*",
            "2 caught (of 2)",
        ]
    )
    assert set(conclusions(pytester.path).values()) == {"caught"}
    assert not list((pytester.path / ".pytest_cache").rglob("*.pyc"))
    header, _ = read_run(pytester)
    assert header["against"] == {
        "text": "mine==1.2.3",
        "paths": [],
        "package": "mine",
        "version": "1.2.3",
    }
    there = cells_of(pytester.path)["test_version cp2"]["against"]["there"]
    assert there["how"] == "verdict"
