from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# The gate must not change from one run to the next, and no test measures time.
settings.register_profile("gate", deadline=None, derandomize=True, database=None)
settings.load_profile("gate")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """This process as the only rank of a world."""
    pytest.importorskip("megatron.core")
    from subjects.tests import worlds

    yield worlds.start_alone(tmp_path_factory.mktemp("world"))
    worlds.end()
