"""The quantized matrices of a Hugging Face folder: which tensors of its files make one matrix."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ...protocol.errors import Unsupported
from ..quant import GroupTensor
from .bitsandbytes import BitsAndBytes
from .compressed_tensors import CompressedTensors, Float8
from .damage import shown
from .gptq_awq import Awq, Gptq
from .mlx import Mlx, is_mlx
from .packed_parts import Scheme, SchemeOf, Settings, StoredMatrix

SCHEMES: Mapping[str, SchemeOf] = {
    "awq": Awq,
    "gptq": Gptq,
    "compressed-tensors": CompressedTensors,
    "fp8": Float8,
    "bitsandbytes": BitsAndBytes,
}


def scheme_of(config: Mapping[str, Any], source: str) -> Scheme | None:
    """From the contents of config.json; None where no weights are quantized. Raises Unsupported, by name."""
    for field in ("quantization", "quantization_config"):  # mlx-lm writes both, with the same contents
        if is_mlx(config.get(field)):
            return Mlx(Settings(config[field], source))
    data = config.get("quantization_config") or config.get("compression_config")
    if not data:
        return None
    if not isinstance(data, dict):
        raise Unsupported(f"{source}: quantization_config is {shown(repr(data))}; it must be an object")
    method = data.get("quant_method")
    make = SCHEMES.get(method) if isinstance(method, str) else None
    if make is None:
        raise Unsupported(
            f"{source}: weights quantized by {shown(repr(method))} are not read; read are {', '.join(SCHEMES)} "
            "and MLX's"
        )
    return make(Settings(data, source))


class QuantizedMatrices:
    """The quantized matrices among a folder's tensors, under the names ``....weight`` that they had before."""

    def __init__(self, scheme: Scheme, stored: Iterable[str], source: str) -> None:
        self._scheme, self._source = scheme, source
        self._parts: dict[str, list[str]] = {}
        names = set(stored)
        for name in names:
            for mark in scheme.marks:
                if name.endswith(f".{mark}"):
                    self._parts[name[: -len(mark) - 1]] = []
        endings = sorted((*scheme.parts, "weight"), key=len, reverse=True)
        self._owned: set[str] = set()
        for name in names:
            for ending in endings:
                stem = name[: -len(ending) - 1]
                if name.endswith(f".{ending}") and stem in self._parts:
                    self._parts[stem].append(ending)
                    self._owned.add(name)
                    break
        for stem, endings_of in self._parts.items():
            if "weight" in endings_of and any(ending in ("qweight", "weight_packed") for ending in endings_of):
                raise Unsupported(f"{source}: {shown(stem)} has both a plain and a quantized weight")
        self._num_packed = self._num_unpacked = 0

    def __contains__(self, name: str) -> bool:
        return name.removesuffix(".weight") in self._parts and name.endswith(".weight")

    def names(self, stored: Iterable[str]) -> list[str]:
        """The folder's tensors, with one name for each quantized matrix."""
        return [*(name for name in stored if name not in self._owned), *(f"{stem}.weight" for stem in self._parts)]

    def has_bias(self, name: str) -> bool:
        """Whether ``name`` is the bias of a quantized matrix."""
        return name.endswith(".bias") and name.removesuffix(".bias") in self._parts

    def read(self, name: str, get: Callable[[str], torch.Tensor]) -> GroupTensor | torch.Tensor:
        """The matrix, of the stored tensors that ``get`` returns."""
        stem = name.removesuffix(".weight")
        tensors = {ending: get(f"{stem}.{ending}") for ending in self._parts[stem]}
        found = self._scheme.matrix(StoredMatrix(self._source, stem, tensors))
        if isinstance(found, GroupTensor):
            self._num_packed += 1
        else:
            self._num_unpacked += 1
        return found

    def unpacked(self) -> str:
        """Which of the matrices that were read are held as floats; empty if none."""
        if not self._num_unpacked:
            return ""
        count = self._num_packed + self._num_unpacked
        return f"{self._scheme.label}: {self._num_unpacked:,} of {count:,} quantized matrices"
