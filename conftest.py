"""What the tests of every part of this repository share."""

from __future__ import annotations

# The plugin is tested through pytest itself; only a root conftest may ask for another plugin.
pytest_plugins = ["pytester"]
