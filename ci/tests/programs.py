"""The programs of ci/ as modules, for tests of what is inside them."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType


def program(name: str) -> ModuleType:
    """Import a program of ci/, which has no suffix."""
    loader = SourceFileLoader(f"ci_{name}", str(Path(__file__).resolve().parents[1] / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by its name
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module
