"""A copy on disk of a model's weights in the form that the CPU's products of bytes read.

Packing a file's weights takes most of the time that a model takes to load; reading the copy takes as long as reading
the file. A copy belongs to one weight file, precision, instruction set and version of the packing code: its name is a
digest of these. It is one file:

    magic | length of the header | digest of the header | header (JSON) | padding | tensors, each at a multiple of 64

A copy that is cut off, or whose header is damaged, is not used and is made again. Each engine reads its copy into
memory of its own, so a copy may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Literal

import msgspec
import torch

from ...cpu_isa import isa
from ...kernels.cpu.machine_code import sources_digest
from ...kernels.linear import PackedBytes, PackedLinear
from ..memory.pages import zeroed_pages
from ..weights.digest import weights_digest

log = logging.getLogger(__name__)

MIN_BYTES = 16 << 20  # of weights; smaller models are packed in no time
MAX_BYTES = 16 << 30  # of all copies in a folder; those that were not used for the longest time are deleted first
UNFINISHED_S = 3600.0  # after which a file that was never finished is deleted
_MAGIC = b"phloem packed 2\n"
_PREFIX_LEN = len(_MAGIC) + 8 + 32
_ALIGNMENT = 64
_ENDING, _UNFINISHED = ".packed", ".unfinished"
_PACKERS = ("kernels", "kernels/cpu", "runtime/layers", "runtime/models", "runtime/quant", "runtime/weights")


class _Place(msgspec.Struct, frozen=True):
    """A tensor in the file; ``start`` counts from the first tensor."""

    start: int
    dtype: Literal["uint8", "float32"]
    shape: tuple[int, ...]


class _Part(msgspec.Struct, frozen=True):
    """A ``PackedBytes``."""

    shape: tuple[int, int]
    bits: Literal[4, 8]
    x_bits: Literal[0, 8, 16]
    records: _Place
    bias: _Place | None


class _Header(msgspec.Struct, frozen=True):
    products: dict[str, list[_Part]]  # by name: the parts of a product
    num_bytes: int  # of all tensors


class PackedCopy:
    """The products of one model, by name: those of its copy, and those given to ``keep``, which ``save`` writes."""

    def __init__(self, folder: Path, path: Path, *, precision: str) -> None:
        """Reads the copy in ``folder``, if there is one. Raises OSError where ``path`` cannot be read."""
        self._path = folder / f"{copy_name(path, precision=precision)}{_ENDING}"
        self._kept: dict[str, tuple[PackedBytes, ...]] = {}
        self._found = _read(self._path)

    def find(self, name: str) -> tuple[PackedBytes, ...] | None:
        """The parts of a product; None where the copy has none of that name."""
        return self._found.get(name)

    def keep(self, name: str, parts: tuple[PackedLinear, ...]) -> None:
        """Remember a product for ``save``, if all of its parts are packed."""
        packed = tuple(part.packed for part in parts)
        if all(part is not None for part in packed):
            self._kept[name] = tuple(part for part in packed if part is not None)

    @property
    def has_new(self) -> bool:
        """Whether there is something for ``save``."""
        return bool(self._kept)

    def save(self) -> None:
        """Write a copy, if products were kept and their weights are worth it; a full disk costs only the copy."""
        header, tensors = _laid_out(self._found | self._kept)
        if not self._kept or not MIN_BYTES <= header.num_bytes <= MAX_BYTES:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._path.parent).free < 2 * header.num_bytes:
                log.warning("%s: too little space for a copy of the packed weights", self._path.parent)
                return
            _write(self._path, header, tensors)
            make_room(self._path.parent, MAX_BYTES)
        except OSError as error:
            log.warning("%s: no copy of the packed weights: %s", self._path, error)


def copy_name(path: Path, *, precision: str) -> str:
    """A digest of all that packed weights follow from."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = blake2b(f"{weights_digest(path)} {stats} {precision} {isa().name} {torch.__version__}".encode())
    package = Path(__file__).parents[2]
    for folder in _PACKERS:
        digest.update(sources_digest(package / folder))
    return digest.hexdigest()[:32]


def make_room(folder: Path, max_bytes: int) -> None:
    """Delete the copies that were not used for the longest time, until the others take at most ``max_bytes``."""
    for file in folder.glob(f"*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > UNFINISHED_S:
                file.unlink()
    copies = []
    for file in folder.glob(f"*{_ENDING}"):
        with contextlib.suppress(OSError):  # another process deletes too
            copies.append((file.stat().st_mtime, file.stat().st_size, file))
    total = sum(size for _, size, _ in copies)
    for _, size, file in sorted(copies):
        if total <= max_bytes:
            break
        file.unlink(missing_ok=True)
        total -= size


def _laid_out(products: dict[str, tuple[PackedBytes, ...]]) -> tuple[_Header, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    end = 0

    def place(tensor: torch.Tensor) -> _Place:
        nonlocal end
        start = end
        end += _padded(tensor.nbytes)
        tensors.append(tensor)
        kind: Literal["uint8", "float32"] = "uint8" if tensor.dtype == torch.uint8 else "float32"
        return _Place(start, kind, tuple(tensor.shape))

    found = {
        name: [
            _Part(
                part.shape,
                part.bits,
                part.x_bits,
                place(part.records),
                None if part.bias is None else place(part.bias),
            )
            for part in parts
        ]
        for name, parts in products.items()
    }
    return _Header(found, end), tensors


def _write(path: Path, header: _Header, tensors: list[torch.Tensor]) -> None:
    """The whole file or none: others see it under its name once it is complete."""
    text = msgspec.json.encode(header)
    number, name = tempfile.mkstemp(suffix=_UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(_MAGIC + len(text).to_bytes(8, "little") + blake2b(text, digest_size=32).digest() + text)
            file.write(bytes(_padded(file.tell()) - file.tell()))
            for tensor in tensors:
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                file.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read(path: Path) -> dict[str, tuple[PackedBytes, ...]]:
    """The copy's products; none where there is no whole copy."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_PREFIX_LEN)
            text_len = int.from_bytes(prefix[len(_MAGIC) : len(_MAGIC) + 8], "little")
            text = file.read(min(text_len, size))
            if not prefix.startswith(_MAGIC) or blake2b(text, digest_size=32).digest() != prefix[-32:]:
                raise ValueError("its header is damaged")
            header = msgspec.json.decode(text, type=_Header)
            begin = _padded(_PREFIX_LEN + len(text))
            if size != begin + header.num_bytes:
                raise ValueError(f"it has {size:,} bytes of {begin + header.num_bytes:,}")
            memory = zeroed_pages(header.num_bytes, large=True)
            file.seek(begin)
            rest = memory.numpy().data
            while len(rest):
                count = file.readinto(rest)
                if not count:
                    raise ValueError("it became shorter")
                rest = rest[count:]
        found = {name: tuple(_part(part, memory) for part in parts) for name, parts in header.products.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log.warning("%s is not used, and made again: %s", path, error)
        return {}
    with contextlib.suppress(OSError):  # a folder that can only be read
        os.utime(path)
    return found


def _part(part: _Part, memory: torch.Tensor) -> PackedBytes:
    bias = None if part.bias is None else _tensor(part.bias, memory)
    found = PackedBytes(part.shape, part.bits, part.x_bits, _tensor(part.records, memory), bias)
    has = tuple(found.records.shape)
    if has != found.layout or (bias is not None and tuple(bias.shape) != part.shape[:1]):
        raise ValueError(f"a product of {part.shape} has records {has}")
    return found


def _tensor(place: _Place, memory: torch.Tensor) -> torch.Tensor:
    dtype = torch.uint8 if place.dtype == "uint8" else torch.float32
    size = prod(place.shape) * dtype.itemsize
    return memory[place.start : place.start + size].view(dtype).view(place.shape)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
