"""What tests that run pytest inside pytest need."""

from __future__ import annotations

import pytest

# An inner session forgets what it imported. torch can't be imported twice in one process, so it
# (and what holds on to its classes) is imported before the first inner session.
import shardproof.controller.protocol
import shardproof.rank.session  # noqa: F401


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Without hypothesis, which every inner session would import for nothing."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
    return pytester
