from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """This process as the only rank of a world."""
    pytest.importorskip("megatron.core")
    from subjects.tests import worlds

    yield worlds.start_alone(tmp_path_factory.mktemp("world"))
    worlds.end()
