"""The project's own promises: what the documents name exists, the lock is complete, CI can fail."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from tests.skips_support import needed, problems

from ci.tests.programs import program
from shardproof.mutants.survivors import read_survivors

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
LOCK = ROOT / "requirements.lock"


@functools.cache
def plugin_help() -> str:
    """What `pytest --help` says of the plugin: its options, and the ini settings of all."""
    command = [sys.executable, "-m", "pytest", "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))


def make_commands(text: str) -> set[str]:
    """Targets of make that a document names in code, or a shell program in its commands."""
    if text.startswith("#!"):
        pieces = re.findall(r"^(?:lane .*)?make .*", text, re.MULTILINE)
    else:
        pieces = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    options = r"(?:(?:--\S+|[A-Z]+=\S+) )*"
    return {
        target
        for piece in pieces
        for target in re.findall(rf"(?<![\w.-])make {options}([a-z][a-z-]+)", piece)
    }


def tracked_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    # Those that are removed, and not yet committed so, are listed too.
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def python_sources() -> dict[str, str]:
    paths = [path for path in tracked_files() if path.suffix == ".py"]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def lock_entries(text: str) -> list[str]:
    body = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    return [entry for entry in re.split(r"\n(?=\S)", body.strip()) if entry]


class TestDocuments:
    def test_every_option_that_the_readme_names_is_registered(self) -> None:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README.read_text()))
        known = set(re.findall(r"--[a-z][a-z-]+", plugin_help()))
        assert "--topology" in named
        assert named <= known

    def test_every_option_of_the_plugin_is_in_the_readme(self) -> None:
        _, _, section = plugin_help().partition("\nparity under sharding:\n")
        registered = set(re.findall(r"^  (--[a-z-]+)", section.split("\n\n")[0], re.MULTILINE))
        assert "--topology" in registered
        missing = {option for option in registered if f"`{option}" not in README.read_text()}
        assert not missing

    def test_ini_settings_of_the_readme_are_those_of_the_plugin(self) -> None:
        named = set(re.findall(r"\bshardproof_[a-z_]+", README.read_text()))
        registered = set(re.findall(r"^  (shardproof_[a-z_]+)", plugin_help(), re.MULTILINE))
        assert named == registered

    @pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".ci/run"])
    def test_every_make_command_exists(self, document: str) -> None:
        named = make_commands((ROOT / document).read_text())
        assert named <= make_targets()
        assert {"parity", "test"} <= named

    @pytest.mark.parametrize("chosen", ["all", "sample:7"])
    @pytest.mark.parametrize(
        ("part", "file"), [("controls", "test_controls"), ("floors", "test_floor_of_cases")]
    )
    def test_a_choice_of_what_runs_is_no_path(self, part: str, file: str, chosen: str) -> None:
        """CONTROLS and FLOORS tell the tests what to take; which file runs stays."""
        command = ["make", "--dry-run", "test", f"PART={part}", f"{part.upper()}={chosen}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert f"pytest subjects/tests/{file}.py" in done.stdout
        assert f"pytest {chosen}" not in done.stdout

    def test_survivors_are_of_code_that_is_there(self) -> None:
        listed = read_survivors(ROOT / "cases" / "survivors.txt")
        assert listed
        for one in listed:
            places = re.findall(r"(\S+\.py) in (\w+)", one.pattern)
            assert places, one.pattern
            for path, function in places:
                assert f"def {function}(" in (ROOT / path).read_text(), one.pattern

    def test_prose_names_no_make_command(self) -> None:
        lines = ["Let one make what is made once; `make lint`.", "```", "make ARGS=x parity", "```"]
        program = ["#!/bin/sh", "# make none", "lane tidy 5 make --keep-going lint", *lines]
        assert make_commands("\n".join(lines)) == {"lint", "parity"}
        assert make_commands("\n".join(program)) == {"lint", "parity"}

    @pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
    def test_every_path_that_a_document_links_to_exists(self, document: str) -> None:
        links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text())
        assert [link for link in links if not (ROOT / link).exists()] == []

    def test_layout_names_folders_that_exist(self) -> None:
        layout = README.read_text().partition("## Layout")[2]
        folders = re.findall(r"^\| `([a-z/]+)`", layout, re.MULTILINE)
        assert len(folders) >= 6
        assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []


class TestReadmeExample:
    @staticmethod
    def example() -> str:
        blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        (block,) = [text for text in blocks if text.startswith("# test_regression.py")]
        return str(block)

    def test_it_passes_on_its_topologies(self, pytester: pytest.Pytester) -> None:
        pytester.makepyfile(test_regression=self.example())
        result = pytester.runpytest()
        result.assert_outcomes(passed=2)
        written = (pytester.path / "reports" / "latest" / "run.jsonl").read_text()
        run, *cells = [json.loads(line) for line in written.splitlines()]
        assert [cell["topology"] for cell in cells] == ["cp2", "cp4"]
        documented = self.documented()
        assert set(run) == documented["The run"]
        for cell in cells:
            assert set(cell) <= documented["A case on a topology"]
            assert cell["observations"]
            for observation in cell["observations"]:
                assert set(observation) == documented["An observation"]

    @staticmethod
    def documented() -> dict[str, set[str]]:
        """Fields by the section of the schema's page that has them in its tables."""
        sections = (ROOT / "docs" / "results.md").read_text().split("\n## ")[1:]
        return {
            section.partition("\n")[0]: set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))
            for section in sections
        }

    def test_without_its_all_reduce_the_gradient_fails(self, pytester: pytest.Pytester) -> None:
        """The gradient of each rank's own rows, never summed over cp."""
        broken = self.example().replace('size("cp") > 1', 'size("cp") > 99')
        assert broken != self.example()
        pytester.makepyfile(test_regression=broken)
        result = pytester.runpytest("--topology", "cp2")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "grad.weight: diverged*",
                "*on cp2*",
                "*the ranks along cp hold parts of a sum*the all-reduce over cp is missing*",
            ]
        )


class TestTrackedFiles:
    # In pieces, so that this file does not hold them.
    FORBIDDEN = re.compile(
        "|".join(
            (
                r"//[\w.-]*" + r"(?:pypi|pythonhosted|npmjs|debian)" + r"\.\w+",
                r"(?:extra-)?index" + r"-url[ =]",
                "file" + "://",
                r"(?<![\w.])/(?:root|home|work)" + r"/\w",
            )
        )
    )

    def test_none_holds_a_registry_host_or_a_path_of_one_machine(self) -> None:
        found = []
        for path in tracked_files():
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if self.FORBIDDEN.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
        assert found == []

    @pytest.mark.parametrize(
        "line",
        [
            "--index" + "-url https:" + "//pypi" + ".org/simple",
            "see https:" + "//files.pythonhosted" + ".org/packages",
            "path = '/root" + "/project'",
            "find-links file" + ":///wheels",
        ],
    )
    def test_the_pattern_finds(self, line: str) -> None:
        assert self.FORBIDDEN.search(line)

    def test_reports_are_ignored_but_for_their_readme(self) -> None:
        def ignored(name: str) -> bool:
            command = ["git", "check-ignore", "--quiet", "--no-index", name]
            return subprocess.run(command, cwd=ROOT, check=False).returncode == 0

        assert ignored("reports/latest/run.jsonl")
        assert not ignored("reports/README.md")


class TestSkips:
    def test_each_says_why_and_what_is_expected_to_fail_is_strict(self) -> None:
        sources = python_sources()
        found = [f"{name}:{one}" for name, text in sources.items() for one in problems(text)]
        assert found == []
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
        assert settings["ini_options"]["xfail_strict"] is True

    @pytest.mark.parametrize(
        ("mark", "said"),
        [
            ("xfail", "xfail without a reason"),
            ("xfail(raises=ValueError)", "xfail without a reason"),
            ("xfail(BROKEN, raises=ValueError, reason='')", "xfail without a reason"),
            ("xfail(reason='#7')", "xfail without raises="),
            ("xfail(reason='#7', raises=ValueError, strict=False)", "xfail that is not strict"),
            ("skip()", "skip without a reason"),
            ("skipif(NO_GPU)", "skipif without a reason"),
        ],
    )
    @pytest.mark.parametrize(
        "place",
        [
            "@pytest.mark.{}\ndef test(): ...",
            "pytestmark = [pytest.mark.{}]",
            "ONE = [pytest.param(1, marks=pytest.mark.{})]",
        ],
    )
    def test_a_mark_that_falls_short_is_found(self, place: str, mark: str, said: str) -> None:
        assert f"1: pytest.mark.{said}" in problems(place.format(mark))

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("pytest.skip()", "pytest.skip without a reason"),
            ("pytest.skip(allow_module_level=True)", "pytest.skip without a reason"),
            ("pytest.xfail('known')", "pytest.xfail ends the test; mark it instead"),
        ],
    )
    def test_a_call_that_falls_short_is_found(self, line: str, said: str) -> None:
        assert problems(f"import pytest\n{line}") == [f"2: {said}"]

    @pytest.mark.parametrize(
        "mark",
        [
            "xfail(reason='#7', raises=ValueError)",
            "xfail(BROKEN, reason=WHY, raises=ValueError, strict=True)",
            "skip('no such kernel')",
            "skipif(NO_GPU, reason='needs a GPU')",
        ],
    )
    def test_what_says_why_is_left_alone(self, mark: str) -> None:
        assert problems(f"@pytest.mark.{mark}\ndef test():\n    'pytest.skip()'") == []

    def test_nothing_is_skipped_for_what_the_lock_installs(self) -> None:
        """A package that no longer imports would skip most of the trainer's tests."""
        modules = set().union(*map(needed, python_sources().values()))
        assert {"megatron.core", "transformers"} <= modules
        assert self.broken(modules) == ""

    def test_a_module_that_does_not_import_is_named(self) -> None:
        source = "json = pytest.importorskip('json')\npytest.importorskip(modname='no_such.module')"
        assert needed(source) == {"json", "no_such.module"}
        assert "No module named 'no_such'" in self.broken(needed(source))

    @staticmethod
    def broken(modules: set[str]) -> str:
        """What the first import that fails says."""
        command = [sys.executable, "-c", "import " + ", ".join(sorted(modules))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""


class TestLock:
    def test_every_entry_is_pinned_with_hashes_and_has_no_address(self) -> None:
        entries = lock_entries(LOCK.read_text())
        assert len(entries) > 30
        for entry in entries:
            assert re.match(r"[a-z0-9-]+==\S+", entry), entry
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
        assert "://" not in LOCK.read_text()

    def test_torch_and_what_only_torch_needs_are_left_out(self) -> None:
        names = {entry.partition("==")[0] for entry in lock_entries(LOCK.read_text())}
        assert {"pytest", "megatron-core", "transformers"} <= names
        assert not names & {"torch", "sympy", "mpmath", "networkx", "triton"}
        assert not [name for name in names if name.startswith("nvidia-")]

    def drift(self, tmp_path: Path, old: str, new: str) -> subprocess.CompletedProcess[str]:
        text = (ROOT / "pyproject.toml").read_text()
        assert old in text
        (tmp_path / "pyproject.toml").write_text(text.replace(old, new))
        shutil.copyfile(LOCK, tmp_path / LOCK.name)
        command = [sys.executable, str(ROOT / "ci" / "lock"), "--check", "--root", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('"pytest>=8.4"', '"pytest>=8.4,<9"', ("-pytest>=8.4", "+pytest>=8.4,<9")),
            ('"psutil>=7"', '"psutil>=7", "pyelftools"', ("+pyelftools [dev]",)),
            ('    "psutil>=7",\n', "", ("-psutil>=7 [dev]",)),
            (">=3.11,<3.14", ">=3.11,<3.15", ("+python >=3.11,<3.15",)),
        ],
        ids=["tightened", "added", "removed", "python"],
    )
    def test_check_fails_when_a_requirement_changed(
        self, tmp_path: Path, old: str, new: str, said: tuple[str, ...]
    ) -> None:
        """A stale lock installs what pyproject.toml no longer asks for."""
        done = self.drift(tmp_path, old, new)
        assert done.returncode == 1
        assert "the requirements changed after requirements.lock was written" in done.stderr
        assert "Run `make lock`" in done.stderr
        for line in said:
            assert f"  {line}\n" in done.stderr

    def test_check_fails_when_the_lock_is_edited_by_hand(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The header is as it was: only compiling again shows it."""
        lock = program("lock")
        shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
        (tmp_path / LOCK.name).write_text(LOCK.read_text() + "left-over==1.0\n")
        monkeypatch.setattr(lock, "compile_lock", lambda *_args, **_pins: LOCK.read_text())
        wrong = lock.check(tmp_path)
        assert "is not what pyproject.toml compiles to" in wrong
        assert "-left-over==1.0" in wrong
        shutil.copyfile(LOCK, tmp_path / LOCK.name)
        assert lock.check(tmp_path) == ""

    def test_check_fails_without_a_lock(self, tmp_path: Path) -> None:
        assert program("lock").check(tmp_path) == "requirements.lock is missing"


class TestSetup:
    def test_stamp_follows_from_all_that_is_installed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        setup = program("setup")
        monkeypatch.setattr(setup, "ROOT", tmp_path)
        (tmp_path / "ci").mkdir()
        for name in setup.INPUTS:
            (tmp_path / name).write_text("1")
        keys = {setup.key("2.13.0"), setup.key("2.14.1")}
        for name in setup.INPUTS:
            (tmp_path / name).write_text("2")
            keys.add(setup.key("2.13.0"))
        assert len(keys) == 2 + len(setup.INPUTS)

    def test_half_an_environment_is_not_usable(self, tmp_path: Path) -> None:
        """An interrupted first run leaves an interpreter without pip."""
        setup = program("setup")
        assert setup.usable(Path(sys.executable))
        assert not setup.usable(tmp_path / "python")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
        assert not setup.usable(tmp_path / "v" / "bin" / "python")


class TestWheel:
    def test_it_ships_the_plugin_alone(self, tmp_path: Path) -> None:
        wheel = program("wheel")
        with zipfile.ZipFile(wheel.build(tmp_path / "dist")) as archive:
            names = archive.namelist()
            (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
            text = archive.read(entry_points).decode()
        assert wheel.wrong_files(names) == ""
        assert "[pytest11]\nshardproof = shardproof.plugin" in text

    @pytest.mark.parametrize(
        ("change", "said"),
        [({"harness/tests/test_x.py"}, "it also holds"), ({"shardproof/py.typed"}, "lacks")],
    )
    def test_a_wrong_list_is_refused(self, change: set[str], said: str) -> None:
        good = {"__init__.py", "py.typed", "plugin.py"}
        names = {f"shardproof/{name}" for name in good} | {"shardproof-0.1.0.dist-info/METADATA"}
        assert program("wheel").wrong_files(sorted(names)) == ""
        assert said in program("wheel").wrong_files(sorted(names ^ change))


class TestCI:
    def run(self, tmp_path: Path, *, failing: str) -> subprocess.CompletedProcess[str]:
        """Run .ci/run where every make target prints its name, and `failing` fails."""
        (tmp_path / ".ci").mkdir()
        shutil.copyfile(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
        targets = " ".join(sorted(make_targets()))
        rule = f'{targets}:\n\t@echo ran $@; [ $@ != "{failing}" ]\n'
        (tmp_path / "Makefile").write_text(rule)
        command = ["bash", ".ci/run"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    def test_it_passes_when_every_lane_does(self, tmp_path: Path) -> None:
        done = self.run(tmp_path, failing="none")
        assert done.returncode == 0, done.stdout
        assert re.findall(r"^ran (\S+)", done.stdout, re.MULTILINE) == [
            *["setup", "lint", "lock-check", "wheel", *["test"] * 5],
            *["mutants", "parity", "parity"],
        ]

    @pytest.mark.parametrize("failing", ["lint", "parity"])
    def test_one_lane_fails_the_whole_and_all_lanes_run(self, tmp_path: Path, failing: str) -> None:
        done = self.run(tmp_path, failing=failing)
        assert done.returncode == 1
        assert "ran parity" in done.stdout
        summary = done.stdout.partition("=== summary")[2]
        assert re.search(rf"^{failing} .*FAILED", summary, re.MULTILINE)
        # parity is two lanes
        assert summary.count("FAILED") == (2 if failing == "parity" else 1)


class TestBenchmark:
    @pytest.mark.parametrize(
        ("kept", "new", "held"),
        [(0.019, 0.039, True), (0.021, 0.039, False), (0.019, 0.041, False)],
    )
    def test_its_limits_hold(self, kept: float, new: float, held: bool) -> None:
        """Against a yardstick of one second: 1/50 is 0.02, and 1/25 is 0.04."""
        benchmark = program("benchmark")
        contenders = benchmark.contenders()
        for one, seconds in zip(contenders, [kept, new, 1.0, 2.0, 5.0, 0.007], strict=True):
            one.samples.extend(benchmark.Sample(case=seconds * k) for k in (1, 1, 90))
        lines, verdict = benchmark.table(2, contenders)
        assert verdict is held
        assert ("OVER" in "\n".join(lines)) is not held
