"""A model's config and tensors on disk, in either format."""

from pathlib import Path
from typing import Protocol

from ...protocol.errors import UnknownModel
from ..quant import Weight
from .damage import refuse_damage
from .gguf_file import GGUFFile
from .model_config import ModelConfig
from .safetensors_file import SafetensorsFolder


class WeightFile(Protocol):
    """``format`` is ``"gguf"`` or ``"safetensors"``: the tensors' names follow it."""

    format: str
    path: Path
    config: ModelConfig

    def names(self) -> list[str]: ...

    def tensor(self, name: str) -> Weight: ...

    def has_packed(self) -> bool:
        """Whether any tensor is quantized."""
        ...

    def unpacked(self) -> str:
        """Which quantized matrices that were read became floats, since no kernel has their form; empty if none."""
        ...


def open_weights(path: Path | str) -> WeightFile:
    """Opens a ``.gguf`` file, or a folder with config.json and safetensors. Reads headers, not weights."""
    path = Path(path)
    with refuse_damage(path):
        if path.is_dir():
            return SafetensorsFolder(path)
        if path.is_file():
            return GGUFFile(path)
    raise UnknownModel(f"no model at {path}: it must be a .gguf file or a folder with config.json and *.safetensors")
