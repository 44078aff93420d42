"""Fixtures of the language's tests: a backend over the string engine, and a fake third party's backend."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import phloem
import pytest
from phloem.lang.backend.phloem_backend import PhloemBackend
from phloem.tests.lang.fakes import Fake, echo
from phloem.tests.lang.loopback import Loopback


@pytest.fixture
def connect() -> Iterator[Callable[..., PhloemBackend]]:
    """``connect(reply=..., select=...)`` makes a compiled backend; ``backend.client.submits``: what it sent."""
    clients: list[Loopback] = []

    def make(**options: Any) -> PhloemBackend:
        clients.append(Loopback(**options))
        return PhloemBackend(clients[-1])

    yield make
    for client in clients:
        client.close()


@pytest.fixture(params=["compiled", "interpreted"])
def backend(request: pytest.FixtureRequest, connect: Callable[..., PhloemBackend]) -> PhloemBackend | Fake:
    """Runs a test on the compiled path and on the interpreted one."""
    return connect(reply=echo) if request.param == "compiled" else Fake()


@pytest.fixture(scope="session")
def engine(tiny_model_path: Path) -> Iterator[phloem.Engine]:
    """A real engine with a tiny random model, for tests that need log-probabilities."""
    with phloem.Engine(model=str(tiny_model_path), precision="float32", num_slots=8192) as engine:
        yield engine
