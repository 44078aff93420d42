"""Names of weights: equal for equal files, and others for other sizes, bytes and configs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from phloem.runtime.weights.digest import weights_digest


def folder_of(path: Path, config: str, weights: bytes = b"w" * 100) -> Path:
    path.mkdir()
    (path / config).write_text('{"lora_alpha": 8}')
    (path / "model.safetensors").write_bytes(weights)
    (path / "README.md").write_text("not read")
    return path


@pytest.mark.parametrize("config", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        (lambda folder, config: (folder / config).write_text('{"lora_alpha": 9}'), False),
        (lambda folder, config: (folder / "model.safetensors").write_bytes(b"w" * 99), False),
        (lambda folder, config: (folder / "model.safetensors").write_bytes(b"w" * 99 + b"v"), False),
        (lambda folder, config: (folder / "README.md").write_text("other"), True),
    ],
)
def test_the_digest_is_of_configs_and_weights(
    tmp_path: Path, config: str, change: Callable[[Path, str], object], is_equal: bool
) -> None:
    one, other = folder_of(tmp_path / "one", config), folder_of(tmp_path / "other", config)
    assert weights_digest(one) == weights_digest(other)
    change(other, config)
    assert (weights_digest(one) == weights_digest(other)) == is_equal
