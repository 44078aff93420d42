"""Fixtures that many folders' tests share."""

from pathlib import Path

import pytest
from phloem.tests.runtime.models.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama and a byte tokenizer with ChatML (see tests/runtime/models/tiny.py)."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)
