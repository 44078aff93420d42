"""A tiny random vision model, its reference in transformers, and an engine on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import CLIENT, Driver
from phloem.tests.runtime.vision.tiny_vision import make_tiny_vision


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("vision") / "tiny")


@pytest.fixture(scope="session")
def reference(vision_folder: Path) -> torch.nn.Module:
    model = transformers.AutoModelForImageTextToText.from_pretrained(vision_folder, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def engine(vision_folder: Path) -> Iterator[EngineCore]:
    engine = EngineCore(EngineConfig(model=str(vision_folder), precision="float32", num_slots=2048, num_threads=1))
    yield engine
    engine.close()


@pytest.fixture
def driver(engine: EngineCore) -> Iterator[Driver]:
    """Starts with an empty cache. After the test its programs are dropped, and no slot or sequence may be left."""
    engine.cache.flush()
    yield Driver(engine)
    engine.drop_client(CLIENT)
    engine.check()
    assert not engine.has_work and not engine.programs.live and engine.cache.num_locked == 0
