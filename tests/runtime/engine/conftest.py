"""Fixtures of the engine's tests: an engine with a tiny random model, and its driver."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from phloem.kernels.backend import CPU, using
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import CLIENT, Driver
from phloem.tests.runtime.executor.stand_in import traced


@pytest.fixture
def kernels_as_one_call() -> Iterator[None]:
    """A stand-in for a GPU records a kernel as one call, whatever memory the CPU's takes inside for its rows."""
    with using(traced(CPU)):
        yield


@pytest.fixture(scope="module")
def engine(tiny_model_path):
    engine = EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=4096))
    yield engine
    engine.close()


@pytest.fixture
def driver(engine):
    """Starts with an empty cache. After the test its programs are dropped, and no slot or sequence may be left."""
    engine.cache.flush()
    yield Driver(engine)
    engine.drop_client(CLIENT)
    engine.check()
    assert not engine.has_work and not engine.programs.live and engine.cache.num_locked == 0


@pytest.fixture
def start(tiny_model_path: Path) -> Iterator[Any]:
    """Starts engines with the tiny model, float32 and one thread."""
    engines: list[EngineCore] = []

    def start(**options: Any) -> Driver:
        engines.append(
            EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32", num_threads=1, **options))
        )
        return Driver(engines[-1])

    yield start
    for engine in engines:
        engine.close()
