"""A release's files, installed by pip into a folder of its own."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from shardproof.against.git import AgainstError

_SHOWN = 12


class Release:
    """One version of a distribution, as asked for: ``package==1.2.3``."""

    def __init__(self, text: str, name: str, version: str) -> None:
        self.text = text
        self.name = name
        self.version = version

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def install(self, releases: Path) -> Path:
        """The folder with the installed release, under ``releases``; kept there for later runs.

        Raises:
            AgainstError: pip could not install it, with pip's own words.
        """
        tag = sys.implementation.cache_tag or sys.implementation.name
        folder = releases / f"{canonicalize_name(self.name)}-{self.version}-{tag}"
        if folder.is_dir():
            if self._intact(folder):
                return folder
            shutil.rmtree(folder, ignore_errors=True)
        releases.mkdir(parents=True, exist_ok=True)
        # Under its name when it is whole, never before.
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=releases))
        try:
            self._pip(part)
            if not self._intact(part):
                raise AgainstError(
                    f"--against {self.text}: pip ended well, but {part.name} holds no intact "
                    f"{self}; try again, or look at what the index serves"
                )
            try:
                part.rename(folder)
            except OSError:  # another run was faster
                if not self._intact(folder):
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return folder

    def _pip(self, folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        command += ["install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder)]
        command.append(f"{self.name}=={self.version}")
        env = {**os.environ, "PIP_USER": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode != 0:
            said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-_SHOWN:])
            raise AgainstError(f"--against {self.text}: pip could not install {self}:\n{said}")

    def _intact(self, folder: Path) -> bool:
        """Whether the folder holds this version, every file as its RECORD says."""
        try:
            distribution = self.distribution(folder)
        except AgainstError:
            return False
        if not distribution.files:
            return False
        for file in distribution.files:
            if file.hash is None:
                continue
            try:
                content = Path(str(file.locate())).read_bytes()
            except OSError:
                # Scripts lie elsewhere than RECORD says when a target folder is used.
                if str(file).startswith(".."):
                    continue
                return False
            digest = hashlib.new(file.hash.mode, content).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                return False
        return True

    def distribution(self, folder: Path) -> Distribution:
        """What is installed in the folder.

        Raises:
            AgainstError: it is not this version.
        """
        for found in importlib.metadata.distributions(path=[str(folder)]):
            if canonicalize_name(found.metadata["Name"]) == canonicalize_name(self.name):
                if Version(found.version) == Version(self.version):
                    return found
                break
        raise AgainstError(f"--against {self.text}: {folder} does not hold {self}")

    def modules(self, folder: Path) -> dict[str, Path]:
        """Its packages and modules by name, with their places; a namespace's parts each."""
        files = self.distribution(folder).files or ()
        return {name: folder / path for name, path in outermost(PurePosixPath(f) for f in files)}

    @staticmethod
    def place(modules: Mapping[str, Path], name: str) -> Path | None:
        """Where a module is among ``modules``, also inside one of them; None where it is not."""
        outer, inner = name, ""
        while outer and outer not in modules:
            outer, _, tail = outer.rpartition(".")
            inner = f"{tail}/{inner}" if inner else tail
        if not outer:
            return None
        place = modules[outer] / inner
        file = place.with_name(f"{place.name}.py")
        return place if place.exists() else file if file.exists() else None


def outermost(files: Iterable[PurePosixPath]) -> list[tuple[str, PurePosixPath]]:
    """The outermost packages with ``__init__.py``, and modules in none, of a list of files."""
    listed = [file for file in files if file.parts and ".." not in file.parts]
    regular = {file.parent for file in listed if file.name == "__init__.py"}
    found: dict[str, PurePosixPath] = {}
    for file in listed:
        parts = file.parts
        if file.suffix != ".py" or parts[0].endswith((".dist-info", ".data")):
            continue
        folders = [PurePosixPath(*parts[:n]) for n in range(1, len(parts))]
        place = next((folder for folder in folders if folder in regular), file)
        names = [*place.parts[:-1], place.name.removesuffix(".py")]
        if all(name.isidentifier() for name in names):
            found[".".join(names)] = place
    return list(found.items())


def parse_release(text: str) -> Release | None:
    """The release that ``package==1.2.3`` names; None for what is a revision.

    Raises:
        AgainstError: it has ``==``, and yet names no single version.
    """
    if "==" not in text:
        return None
    try:
        requirement = Requirement(text)
        (specifier,) = requirement.specifier
        version = str(Version(specifier.version))
    except (InvalidRequirement, InvalidVersion, ValueError) as error:
        raise AgainstError(
            f"--against {text}: expected one version, 'package==1.2.3', or a revision; {error}"
        ) from error
    if requirement.extras or requirement.marker or specifier.operator != "==":
        raise AgainstError(
            f"--against {text}: expected one version, 'package==1.2.3', without extras or markers: "
            "the release alone is installed, and its dependencies are those of this environment"
        )
    return Release(text, requirement.name, version)
