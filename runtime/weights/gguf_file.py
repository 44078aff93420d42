"""The weights of a GGUF file, mapped into memory. Quantised tensors stay in the file's blocks."""

from pathlib import Path

import torch

from ...protocol.errors import UnknownModel
from ..quant import QuantTensor
from .gguf_header import TensorPlace, read_header
from .mapped import forget_pages, map_file
from .model_config import ROPE_FACTORS, ModelConfig, config_from_gguf
from .part import Part, part_of

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# llama.cpp writes the query and key rows of these for its interleaved rope; those of others are left as trained.
_INTERLEAVED = ("llama", "mistral", "mixtral", "granite", "smollm3")


class GGUFFile:
    """Tensors under the file's own names, their query and key rows in Hugging Face's half-split rope order."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = read_header(path)
        self._map = map_file(path)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        factors = {name: self._float(name) for name in ROPE_FACTORS if name in self._header.tensors}
        self.config: ModelConfig = config_from_gguf(
            self._header.metadata,
            source=str(path),
            tensor_names=frozenset(self._header.tensors),
            rope_factors={name: tuple(tensor.tolist()) for name, tensor in factors.items()},
        )

    def names(self) -> list[str]:
        return list(self._header.tensors)

    def tensor(self, name: str, part: Part | None = None) -> torch.Tensor | QuantTensor:
        """A mapped tensor, or ``part`` of it, to be read only.

        Raises UnknownModel for a name that is not in the file.
        """
        place = self._place(name)
        found: torch.Tensor | QuantTensor
        if place.kind in _FLOATS:
            found = self._float(name)
        else:
            raw = self._bytes[place.start : place.start + place.size_bytes]
            found = QuantTensor.from_bytes(place.kind, raw, place.shape)
        order = stored_row_order(self.config, name, place.shape[0], source=str(self.path))
        if order is not None:
            if part is not None and part.rows is not None:
                order = torch.cat([order[run.start : run.stop] for run in part.rows])
                part = Part(columns=part.columns)
            found = found.take_rows(order) if isinstance(found, QuantTensor) else found[order]
        return found if part is None else part_of(found, part)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._place(name).shape)

    def _place(self, name: str) -> TensorPlace:
        place = self._header.tensors.get(name)
        if place is None:
            raise UnknownModel(f"{self.path} has no tensor {name}; the file is incomplete or of another architecture")
        return place

    def has_packed(self) -> bool:
        return any(place.kind not in _FLOATS for place in self._header.tensors.values())

    def release(self) -> None:
        forget_pages(self._map)

    def unpacked(self) -> str:
        return ""

    def _float(self, name: str) -> torch.Tensor:
        place = self._header.tensors[name]
        raw = self._bytes[place.start : place.start + place.size_bytes]
        return raw.view(_FLOATS[place.kind]).view(place.shape)


def stored_row_order(config: ModelConfig, name: str, num_rows: int, *, source: str = "") -> torch.Tensor | None:
    """For a query or key projection stored for interleaved rope, where in the file each row lies; else None.

    In the file, row ``2i + h`` of a head is the i-th of half h; here half h is rows ``[h D/2, (h+1) D/2)``.
    """
    part = name.split(".")
    if config.family not in _INTERLEAVED or len(part) != 4 or part[2] not in ("attn_q", "attn_k"):
        return None
    if num_rows % config.head_dim:
        heads = f"heads of {config.head_dim} rows, as its config asks"
        raise UnknownModel(f"{source}: tensor {name} has {num_rows} rows, which are no {heads}")
    pairs = torch.arange(num_rows).view(-1, config.head_dim // 2, 2)
    return pairs.transpose(1, 2).reshape(-1)
