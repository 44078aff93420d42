"""A model's config and tensors on disk, whatever the format. Never keeps a converted copy of a tensor."""

from pathlib import Path
from typing import Protocol

import torch

from ...protocol.errors import UnknownModel
from ..quant import QuantTensor
from .gguf_file import GGUFFile
from .model_config import ModelConfig
from .safetensors_file import SafetensorsFolder


class WeightFile(Protocol):
    """``format`` is ``"gguf"`` or ``"safetensors"`` and says by which names the tensors go."""

    format: str
    path: Path
    config: ModelConfig

    def names(self) -> list[str]: ...

    def tensor(self, name: str) -> torch.Tensor | QuantTensor: ...


def open_weights(path: Path | str) -> WeightFile:
    """A ``.gguf`` file, or a folder with config.json and safetensors. Costs the headers, not the weights."""
    path = Path(path)
    if path.is_dir():
        return SafetensorsFolder(path)
    if path.is_file():
        return GGUFFile(path)
    raise UnknownModel(f"no model at {path}: it must be a .gguf file or a folder with config.json and *.safetensors")
