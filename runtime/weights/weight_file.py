"""A model's config and tensors on disk, in either format."""

from pathlib import Path
from typing import Protocol

from ...protocol.errors import UnknownModel
from ..quant import Weight
from .damage import refuse_damage
from .gguf_file import GGUFFile
from .model_config import ModelConfig
from .onnx_folder import OnnxFolder
from .part import Part
from .safetensors_file import SafetensorsFolder


class WeightFile(Protocol):
    """``format`` is ``"gguf"`` or ``"safetensors"``: the tensors' names follow it, those of an ONNX graph too."""

    format: str
    path: Path
    config: ModelConfig

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor. Reads no weights."""
        ...

    def tensor(self, name: str, part: Part | None = None) -> Weight:
        """The whole tensor, or only ``part`` of it: no other bytes of it are read."""
        ...

    def has_packed(self) -> bool:
        """Whether any tensor is quantized."""
        ...

    def release(self) -> None:
        """Takes what was read so far out of this process's memory; later reads bring it back. Tensors that were not
        copied stay valid.
        """
        ...

    def unpacked(self) -> str:
        """Which quantized matrices that were read became floats, since no kernel has their form; empty if none."""
        ...


def open_weights(path: Path | str) -> WeightFile:
    """Opens a ``.gguf`` file, or a folder with config.json and safetensors or ONNX. Reads headers, not weights."""
    path = Path(path)
    with refuse_damage(path):
        if path.is_dir():
            is_onnx = any(path.glob("*.onnx")) and not any(path.glob("*.safetensors"))
            return OnnxFolder(path) if is_onnx else SafetensorsFolder(path)
        if path.is_file():
            return GGUFFile(path)
    raise UnknownModel(
        f"no model at {path}: it must be a .gguf file, or a folder with config.json and *.safetensors or *.onnx"
    )
