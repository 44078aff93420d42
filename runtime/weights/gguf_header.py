"""A GGUF file's metadata and the places of its tensors, without torch and without reading the tensors.

A vocabulary of 150,000 tokens takes some tenths of a second, so a header is read once for tokenizer, chat template and
weights: while somebody holds it, ``read_header`` of the same file returns it again.
"""

import math
import mmap
import os
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...protocol.errors import UnknownModel, Unsupported
from .damage import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
# ggml's formats of tensors: the name, and the numbers and bytes of a block. The package gguf has the same table, but
# takes 16 ms to import.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
_STRING, _ARRAY = 8, 9
MAX_NAME_BYTES = 65_535  # of a key or a tensor's name; the format's limit for keys
MAX_NESTING = 4  # of lists in lists


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """``kind`` is ggml's name of the format; ``shape`` has the longest stride first; ``start`` is a file offset."""

    kind: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GGUFHeader:
    """``metadata``: numbers, strings, lists of strings, and numpy arrays for lists of numbers. Shared, so read only."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]


_held: weakref.WeakValueDictionary[tuple[Path, int, int, int], GGUFHeader] = weakref.WeakValueDictionary()


def read_header(path: Path | str) -> GGUFHeader:
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = os.fstat(file.fileno())
            key = (path, found.st_ino, found.st_size, found.st_mtime_ns)
            header = _held.get(key)
            if header is None:
                _held[key] = header = _Cursor(path, data).header()
            return header
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
            key = self.name()
            metadata[key] = self.value(self.scalar("<I"))
        found = [self.place() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise UnknownModel(f"{self.path}: general.alignment is {shown(repr(alignment))}; it is a multiple of 8")
        data_start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorPlace] = {}
        for name, kind, shape, offset in found:
            kind_name, size = self.size_of(name, kind, shape)
            if offset % alignment:
                raise UnknownModel(
                    f"{self.path}: tensor {shown(name)} begins at offset {offset:,}, which is no multiple of "
                    f"{alignment}; fetch it again"
                )
            start = data_start + offset
            if start + size > self.size:
                raise UnknownModel(
                    f"{self.path} ends at byte {self.size:,}, but tensor {shown(name)} ends at {start + size:,}; "
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

    def name(self) -> str:
        length = struct.unpack_from("<Q", self.data, self.at)[0] if self.at + 8 <= self.size else 0
        if length > MAX_NAME_BYTES:
            raise UnknownModel(f"{self.path}: a name of {length:,} bytes at byte {self.at:,}; fetch it again")
        return self.string()

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < MAX_NESTING:
            return self.array(depth + 1)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise UnknownModel(f"{self.path}: metadata of unknown type {kind} at byte {self.at:,}")

    def array(self, depth: int) -> Any:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype)
        if kind != _STRING:
            return [self.value(kind, depth) for _ in range(count)]
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
        name = self.name()
        num_dims = self.scalar("<I")
        if num_dims > 4:
            raise UnknownModel(f"{self.path}: tensor {shown(name)} with {num_dims} dimensions; the format allows 4")
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        return name, self.scalar("<I"), tuple(reversed(dims)), self.scalar("<Q")

    def size_of(self, name: str, kind: int, shape: tuple[int, ...]) -> tuple[str, int]:
        if kind not in GGML_TYPES:
            raise Unsupported(f"{self.path}: tensor {shown(name)} is of ggml type {kind}, which is not known")
        kind_name, block_len, block_bytes = GGML_TYPES[kind]
        if not shape or min(shape) < 1 or shape[-1] % block_len:
            raise UnknownModel(
                f"{self.path}: tensor {shown(name)} is {list(shape)}; {kind_name} has rows of whole blocks of "
                f"{block_len} numbers"
            )
        return kind_name, math.prod(shape) // block_len * block_bytes
