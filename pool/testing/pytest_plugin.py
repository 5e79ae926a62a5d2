"""Fixtures for pytest: say `pytest_plugins = ["kvpool.testing.pytest_plugin"]` in the conftest.py at the root."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from kvpool.testing.rack import Rack

__all__ = ["kvpool_rack"]


@pytest.fixture
def kvpool_rack() -> Iterator[Callable[..., Rack]]:
    """Make racks: `rack = kvpool_rack(hosts=2, seed=7)`, with what `Rack` takes. They end with the test."""
    with contextlib.ExitStack() as racks:
        yield lambda *args, **options: racks.enter_context(Rack(*args, **options))
