"""Fixtures of the language's tests: a backend over the string engine, and a fake third party's backend."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from phloem.lang.backend.phloem_backend import PhloemBackend
from phloem.tests.lang.loopback import Loopback


@pytest.fixture
def connect() -> Iterator[Callable[..., PhloemBackend]]:
    """``connect(reply=..., select=...)`` makes a compiled backend; ``backend.client.submits`` tells what it sent."""
    clients: list[Loopback] = []

    def make(**options: Any) -> PhloemBackend:
        clients.append(Loopback(**options))
        return PhloemBackend(clients[-1])

    yield make
    for client in clients:
        client.close()
