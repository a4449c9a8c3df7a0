"""Which modules are the subject, where imports of them lead, and what is found out afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.against_support import write

from shardproof.against.raised import ASSERTION, ERROR, MISSING, describe
from shardproof.against.redirect import VARIABLE, Redirect, keep_first
from shardproof.against.subject import Subject, from_data, module_names, to_data

HARNESS = Path(__file__).resolve().parents[1]

IMPORTS = """
    import importlib, json, sys
    import shardproof.against.preload
    from shardproof.against.loaded import loaded
    from shardproof.against.redirect import Redirect

    (finder,) = [one for one in sys.meta_path if isinstance(one, Redirect)]
    first = json.loads(sys.argv[1])
    exec(first["before"])
    told = {}
    for name in first["modules"]:
        try:
            module = importlib.import_module(name)
            told[name] = getattr(module, "SIDE", "no side")
        except ImportError as error:
            told[name] = f"{type(error).__name__}: {error}"
    told["wrong"] = [name for name, _ in loaded(finder.subject).wrong]
    told["right"] = loaded(finder.subject).right
    print(json.dumps(told))
"""


def imported(
    tmp_path: Path, subject: Subject, *modules: str, path: list[Path], before: str = ""
) -> dict[str, object]:
    """Import modules in a process of its own whose imports are redirected."""
    write(tmp_path / "program", {"program.py": IMPORTS})
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            str(tmp_path / "program/program.py"),
            json.dumps({"modules": modules, "before": before}),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [*path, HARNESS])),
            VARIABLE: json.dumps(to_data(subject)),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


def two_sides(tmp_path: Path, here: dict[str, str], there: dict[str, str]) -> tuple[Path, Path]:
    write(tmp_path / "here", here)
    write(tmp_path / "there", there)
    return (tmp_path / "here").resolve(), (tmp_path / "there").resolve()


def subject_of(
    here: Path, there: Path, declared: str, path: list[Path], kept: tuple[str, ...] = ()
) -> Subject:
    place = here / declared
    return Subject(
        "REV",
        ((str(place), str(there / declared)),),
        tuple(module_names(place, there / declared, [str(entry) for entry in path])),
        kept,
    )


PACKAGE = {"src/mine/__init__.py": "SIDE = 'here'", "src/mine/part.py": "SIDE = 'here'"}
PARENT = {"src/mine/__init__.py": "SIDE = 'there'", "src/mine/part.py": "SIDE = 'there'"}


BY_FILE = """
import importlib.util
spec = importlib.util.spec_from_file_location("own", HERE + "/mine/part.py")
sys.modules["own"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["own"])
"""


class TestNames:
    @pytest.mark.parametrize(
        ("declared", "path", "names"),
        [
            ("src/mine", ["src"], ["mine"]),
            ("src/mine", ["."], ["src.mine"]),
            ("src/mine", [".", "src"], ["src.mine", "mine"]),
            ("src/mine", [], ["mine"]),
            ("src/mine/inner", ["src"], ["mine.inner"]),
            ("src", ["src"], ["mine", "alone"]),
            ("src/alone.py", ["src"], ["alone"]),
            ("space/part", ["."], ["space.part"]),
            ("odd-name/mine", ["."], ["mine"]),
        ],
    )
    def test_they_follow_from_the_import_path(
        self, tmp_path: Path, declared: str, path: list[str], names: list[str]
    ) -> None:
        write(
            tmp_path,
            {
                **PACKAGE,
                "src/mine/inner/__init__.py": "",
                "src/alone.py": "",
                "src/data/readme.txt": "",
                "space/part/__init__.py": "",
                "odd-name/mine/__init__.py": "",
            },
        )
        root = tmp_path.resolve()
        entries = [str(root / entry) for entry in path]
        found = module_names(root / declared, Path("/there") / declared, entries)
        assert sorted(name for name, _ in found) == sorted(names)

    def test_a_namespace_is_not_named_by_its_last_part_alone(self, tmp_path: Path) -> None:
        """Else an unrelated module of that name would be condemned."""
        write(tmp_path, {"space/utils/__init__.py": ""})
        found = module_names(tmp_path / "space/utils", Path("/there"), [str(tmp_path)])
        assert found == [("space.utils", "/there")]

    def test_data_survives_json(self) -> None:
        subject = Subject("REV", (("/a", "/b"),), (("mine", "/b"),), ("/a/tests",), ("/c",))
        assert from_data(json.loads(json.dumps(to_data(subject)))) == subject


class TestRedirect:
    def test_a_package_found_on_the_path_comes_from_there(self, tmp_path: Path) -> None:
        here, there = two_sides(
            tmp_path,
            {**PACKAGE, "src/mine/new.py": "SIDE = 'here'", "src/other.py": "SIDE = 'here'"},
            {**PARENT, "src/mine/old.py": "SIDE = 'there'"},
        )
        path = [here / "src"]
        subject = subject_of(here, there, "src/mine", path)
        modules = ("mine", "mine.part", "mine.old", "mine.new", "other")
        told = imported(tmp_path, subject, *modules, path=path)
        assert told == {
            "mine": "there",
            "mine.part": "there",
            "mine.old": "there",
            "mine.new": "ModuleNotFoundError: No module named 'mine.new'",
            "other": "here",
            "wrong": [],
            "right": 3,
        }

    def test_a_module_that_rev_lacks_is_missing_and_not_taken_from_here(
        self, tmp_path: Path
    ) -> None:
        here, there = two_sides(tmp_path, {**PACKAGE, "src/alone.py": "SIDE = 'here'"}, PARENT)
        path = [here / "src"]
        subject = subject_of(here, there, "src", path)
        told = imported(tmp_path, subject, "mine", "alone", path=path)
        assert told["mine"] == "there"
        assert str(told["alone"]).startswith(
            "ModuleNotFoundError: No module named 'alone' in REV: "
        )

    def test_part_of_a_package_leaves_the_rest(self, tmp_path: Path) -> None:
        """subjects/trainer is under test, subjects/types.py is the contract of today."""
        here, there = two_sides(
            tmp_path,
            {**PACKAGE, "src/mine/inner/__init__.py": "SIDE = 'here'"},
            {**PARENT, "src/mine/inner/__init__.py": "SIDE = 'there'"},
        )
        path = [here / "src"]
        subject = subject_of(here, there, "src/mine/inner", path)
        told = imported(tmp_path, subject, "mine", "mine.part", "mine.inner", path=path)
        assert (told["mine"], told["mine.part"], told["mine.inner"]) == ("here", "here", "there")

    def test_namespaces_keep_their_other_parts(self, tmp_path: Path) -> None:
        here, there = two_sides(
            tmp_path,
            {"src/space/mine.py": "SIDE = 'here'"},
            {"src/space/mine.py": "SIDE = 'there'"},
        )
        write(tmp_path / "installed", {"space/theirs.py": "SIDE = 'installed'"})
        path = [here / "src", tmp_path / "installed"]
        subject = subject_of(here, there, "src/space", path)
        # A path that changes later makes the import system look for a namespace's parts again.
        before = f"import space; sys.path.insert(0, {str(tmp_path)!r})"
        told = imported(tmp_path, subject, "space.mine", "space.theirs", path=path, before=before)
        assert told["space.mine"] == "there"
        assert told["space.theirs"] == "installed"
        assert told["wrong"] == []

    def test_a_checkout_put_first_on_the_path_later_changes_nothing(self, tmp_path: Path) -> None:
        here, there = two_sides(tmp_path, PACKAGE, PARENT)
        subject = subject_of(here, there, "src/mine", [])
        before = f"sys.path.insert(0, {str(here / 'src')!r})"
        told = imported(tmp_path, subject, "mine.part", path=[], before=before)
        assert (told["mine.part"], told["wrong"]) == ("there", [])

    def test_an_unknown_name_is_known_by_its_place(self, tmp_path: Path) -> None:
        """The path that makes src.mine importable is not known when names are."""
        here, there = two_sides(tmp_path, PACKAGE, PARENT)
        subject = subject_of(here, there, "src/mine", [here / "src"])
        before = f"sys.path.insert(0, {str(here)!r})"
        told = imported(tmp_path, subject, "src.mine.part", path=[here / "src"], before=before)
        assert (told["src.mine.part"], told["wrong"]) == ("there", [])

    def test_cases_and_conftest_files_inside_stay(self, tmp_path: Path) -> None:
        cases = {"src/mine/tests/__init__.py": "", "src/mine/tests/test_x.py": "SIDE = 'here'"}
        here, there = two_sides(
            tmp_path,
            {**PACKAGE, **cases, "src/mine/conftest.py": "SIDE = 'here'"},
            {**PARENT, "src/mine/conftest.py": "SIDE = 'there'"},
        )
        path = [here / "src"]
        kept = (str(here / "src/mine/tests"),)
        subject = subject_of(here, there, "src/mine", path, kept)
        modules = ("mine.part", "mine.tests.test_x", "mine.conftest")
        told = imported(tmp_path, subject, *modules, path=path)
        assert [told[name] for name in modules] == ["there", "here", "here"]
        assert told["wrong"] == []

    @pytest.mark.parametrize(
        "before",
        [
            "sys.meta_path.remove(finder); import mine.part",
            "sys.meta_path.remove(finder); sys.path.insert(0, HERE); import mine.part",
            BY_FILE,
        ],
        ids=["installed copy", "checkout", "by file"],
    )
    def test_what_came_from_elsewhere_is_found(self, tmp_path: Path, before: str) -> None:
        here, there = two_sides(tmp_path, PACKAGE, PARENT)
        write(tmp_path / "copy", {"mine/__init__.py": "", "mine/part.py": ""})
        subject = subject_of(here, there, "src/mine", [here / "src"])
        before = f"HERE = {str(here / 'src')!r}\n{before}"
        told = imported(tmp_path, subject, path=[tmp_path / "copy"], before=before)
        assert told["wrong"] in (["mine", "mine.part"], ["own"])

    def test_what_the_interpreter_imports_as_it_starts_is_found(self, tmp_path: Path) -> None:
        """No finder can be earlier than sitecustomize."""
        here, there = two_sides(tmp_path, PACKAGE, PARENT)
        early = f"import sys\nsys.path.insert(0, {str(here / 'src')!r})\nimport mine\n"
        write(tmp_path / "early", {"sitecustomize.py": early})
        subject = subject_of(here, there, "src/mine", [here / "src"])
        told = imported(tmp_path, subject, path=[tmp_path / "early"])
        assert (told["wrong"], told["right"]) == (["mine"], 0)

    def test_it_goes_before_finders_that_came_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        redirect = Redirect(Subject("REV"))
        others = list(sys.meta_path)
        monkeypatch.setattr(sys, "meta_path", [*others, redirect])
        keep_first()
        assert sys.meta_path == [redirect, *others]


class TestRaised:
    """An exception by where it was raised: by the case, or in the subject."""

    SUBJECT = """
        class Trainer:
            def forward(self, x):
                return None

            def later(self):
                raise NotImplementedError("not yet")

            def broken(self):
                assert 1 == 2

            def fails(self):
                raise ValueError("a bug")

            def uses_gone(self):
                import os
                return os.gone
    """

    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            ("assert 1 == 2", ASSERTION),
            ("pytest.fail('no')", ASSERTION),
            ("with pytest.raises(ValueError): pass", ASSERTION),
            ("torch.testing.assert_close(torch.ones(2), torch.zeros(2))", ASSERTION),
            ("trainer.broken()", ERROR),
            ("trainer.fails()", ERROR),
            ("trainer.forward(1).shape", ERROR),
            ("raise RuntimeError('shape')", ERROR),
            ("'a' + 1", ERROR),
            ("trainer.backward()", MISSING),
            ("trainer.forward(1, mask=2)", MISSING),
            ("trainer.forward()", MISSING),
            ("trainer.forward(1, 2, 3)", MISSING),
            ("trainer.later()", MISSING),
            ("trainer.uses_gone()", MISSING),
            ("from subject import Optimizer", MISSING),
            ("import subject.parts", MISSING),
        ],
    )
    def test_kind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, kind: str
    ) -> None:
        import torch

        write(tmp_path / "there", {"subject.py": self.SUBJECT})
        monkeypatch.syspath_prepend(str(tmp_path / "there"))
        sys.modules.pop("subject", None)
        case = tmp_path / "here" / "test_case.py"
        write(tmp_path / "here", {"test_case.py": code})
        place = str((tmp_path / "there").resolve())
        subject = Subject("REV", ((str(tmp_path / "x"), place),), (("subject", place),))
        import importlib

        trainer = importlib.import_module("subject").Trainer()
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - what it is, is the question
            exec(  # noqa: S102
                compile(case.read_text("utf-8"), str(case.resolve()), "exec"),
                {"pytest": pytest, "torch": torch, "trainer": trainer},
            )
        told = describe(caught.value, subject)
        assert told["kind"] == kind, told
        assert type(caught.value).__name__ in told["types"]
        sys.modules.pop("subject", None)
