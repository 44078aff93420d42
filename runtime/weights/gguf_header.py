"""A GGUF file's metadata and the places of its tensors, without torch and without reading the tensors.

A vocabulary of 150,000 tokens takes some tenths of a second, so a tokenizer can read the header too.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ...protocol.errors import UnknownModel, Unsupported

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """``kind`` is ggml's name of the format; ``shape`` has the longest stride first; ``start`` is a file offset."""

    kind: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """``metadata``: numbers, strings, lists of strings, and numpy arrays for lists of numbers."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_header(path: Path | str) -> GGUFHeader:
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).header()
    except (OSError, ValueError) as error:
        if isinstance(error, UnknownModel | Unsupported):
            raise
        raise UnknownModel(f"{path} cannot be read as a GGUF file: {error}") from error


class _Cursor:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0

    def header(self) -> GGUFHeader:
        if self.take(4) != MAGIC:
            raise UnknownModel(f"{self.path} is not a GGUF file: it starts with {self.data[:4]!r}, not {MAGIC!r}")
        version = self.scalar("<I")
        if version not in VERSIONS:
            raise Unsupported(f"{self.path}: GGUF version {version}; read are 2 and 3, little-endian")
        num_tensors, num_fields = self.scalar("<Q"), self.scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self.string()
            metadata[key] = self.value(self.scalar("<I"))
        found = [self.place() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        if alignment < 1:
            raise UnknownModel(f"{self.path}: general.alignment is {alignment}")
        data_start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorPlace] = {}
        for name, kind, shape, offset in found:
            kind_name, size = self.size_of(name, kind, shape)
            start = data_start + offset
            if start + size > self.size:
                raise UnknownModel(
                    f"{self.path} ends at byte {self.size:,}, but tensor {name} ends at {start + size:,}; "
                    "the download is incomplete: fetch it again"
                )
            tensors[name] = TensorPlace(kind_name, shape, start, size)
        return GGUFHeader(self.path, metadata, tensors)

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > self.size:
            raise UnknownModel(f"{self.path} ends at byte {self.size:,} inside its header; fetch it again")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise UnknownModel(f"{self.path}: metadata of unknown type {kind} at byte {self.at:,}")

    def array(self) -> Any:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype)
        if kind != _STRING:
            return [self.value(kind) for _ in range(count)]
        texts, data, at, length = [], self.data, self.at, struct.Struct("<Q")
        try:
            for _ in range(count):
                end = at + 8 + length.unpack_from(data, at)[0]
                texts.append(data[at + 8 : end].decode("utf-8", errors="surrogateescape"))
                at = end
        except struct.error:
            at = self.size + 1
        self.at = at
        self.take(0)
        return texts

    def place(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self.string()
        num_dims = self.scalar("<I")
        if num_dims > 4:
            raise UnknownModel(f"{self.path}: tensor {name} with {num_dims} dimensions; the format allows 4")
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        return name, self.scalar("<I"), tuple(reversed(dims)), self.scalar("<Q")

    def size_of(self, name: str, kind: int, shape: tuple[int, ...]) -> tuple[str, int]:
        try:
            ggml_type = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise Unsupported(f"{self.path}: tensor {name} is of ggml type {kind}, which is not known") from None
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        return ggml_type.name, math.prod(shape) // block_len * block_bytes
