"""What the quantized checkpoints have in common: the stored parts of one matrix, checked, and numbers in words."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...protocol.errors import UnknownModel, Unsupported
from ..quant import GroupTensor
from .damage import shown

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn,)
INTS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The tensors of one quantized matrix, by the ending of their names."""

    source: str
    stem: str  # of the tensors' names
    tensors: Mapping[str, torch.Tensor]

    def take(self, part: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]) -> torch.Tensor:
        """A part of that shape; None stands for any size. Raises UnknownModel where it is another, or is missing."""
        found = self.tensors.get(part)
        if found is None:
            raise UnknownModel(f"{self.source} has no tensor {self.name(part)}, which its quantization needs")
        if found.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise UnknownModel(f"{self.source}: tensor {self.name(part)} is of {found.dtype}, not {wanted}")
        is_equal = found.ndim == len(shape) and all(
            wanted in (None, size) for wanted, size in zip(shape, found.shape, strict=True)
        )
        if not is_equal or not found.numel():
            asked = ", ".join("any" if size is None else f"{size:,}" for size in shape)
            raise UnknownModel(
                f"{self.source}: tensor {self.name(part)} is {list(found.shape)}, but its quantization asks for "
                f"[{asked}]"
            )
        return found

    def scales(self, part: str, num_rows: int, width: int, block: tuple[int, int] | None) -> torch.Tensor:
        """Float factors that fit [N, K], as float32 [N, K]-broadcastable: of the tensor, of rows, of groups, of blocks.

        ``block`` (rows, columns): each block's own factor; None: one of the tensor, or one for each row.
        """
        if block is not None:
            rows, columns = block
            found = self.take(part, FLOATS, (-(-num_rows // rows), -(-width // columns))).float()
            spread = found.repeat_interleave(rows, dim=0)[:num_rows]
            return spread.repeat_interleave(columns, dim=1)[:, :width]
        found = self.take(part, FLOATS, (None,) * self.tensors[part].ndim if part in self.tensors else (1,))
        if found.numel() not in (1, num_rows):
            raise UnknownModel(
                f"{self.source}: tensor {self.name(part)} is {list(found.shape)}; it must have 1 number or {num_rows:,}"
            )
        return found.float().reshape(-1, 1)

    def has(self, part: str) -> bool:
        return part in self.tensors

    def name(self, part: str) -> str:
        return shown(f"{self.stem}.{part}")

    def refuse(self, reason: str) -> UnknownModel:
        return UnknownModel(f"{self.source}: {shown(self.stem)}: {reason}")


class Scheme(Protocol):
    """How a checkpoint stores its quantized matrices.

    ``parts``: the endings of their tensors' names in place of ``weight``. ``marks``: a matrix is quantized if it has
    one of these.
    """

    @property
    def label(self) -> str: ...

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def marks(self) -> tuple[str, ...]: ...

    def matrix(self, parts: StoredMatrix, /) -> GroupTensor | torch.Tensor:
        """The matrix [N, K], packed where the kernels have its form, else float32. Raises UnknownModel, Unsupported."""
        ...


class Settings:
    """A checkpoint's ``quantization_config``. Each field is read with the values that are known; others are refused."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data, self.source = data, source

    def choice(self, field: str, known: tuple[Any, ...], default: Any = None) -> Any:
        value = self.data.get(field, default)
        if not any(value is other or (value == other and type(value) is type(other)) for other in known):
            values = ", ".join(map(repr, known))
            raise self.unsupported(field, value, f"read are {values}")
        return value

    def size(self, field: str) -> int:
        """A number of at least 1, or -1."""
        value = self.data.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or 1 <= value < 1 << 31):
            raise self.unsupported(field, value, "it must be a number of at least 1, or -1")
        return value

    def unsupported(self, field: str, value: Any, reason: str) -> Unsupported:
        return Unsupported(f"{self.source}: quantization_config: {field} is {shown(repr(value))}; {reason}")


def unpack_words(words: torch.Tensor, bits: int, *, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """uint8 [..., W * 32 / bits] from words int32 [..., W]: the lowest bits are the first number.

    ``order[i]``: the place among a word's numbers of that at bit ``bits * i``.
    """
    count = 32 // bits
    mask = (1 << bits) - 1
    out = torch.empty((*words.shape, count), dtype=torch.uint8)
    for i in range(count):
        out[..., i if order is None else order[i]] = (words >> (bits * i)) & mask
    return out.flatten(-2)


def unpack_bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [N, W * 32 / bits] from words of 32 bits [N, W]: each number follows the one before, over borders of words.

    W * 32 is a multiple of 8 * bits.
    """
    eights = words.contiguous().view(torch.uint8).view(len(words), -1, bits)  # the bytes of eight numbers
    out = torch.empty((*eights.shape[:2], 8), dtype=torch.uint8)
    mask = (1 << bits) - 1
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        number = eights[..., byte] >> shift
        if shift + bits > 8:
            number = number | eights[..., byte + 1] << (8 - shift)
        out[..., i] = number & mask
    return out.flatten(1)


def group_len_of(parts: StoredMatrix, size: int, width: int) -> int:
    """``size`` with -1 for whole rows. Raises UnknownModel where it does not fit rows of ``width`` weights."""
    found = width if size == -1 else size
    if found > width:
        raise parts.refuse(f"groups of {found:,} in rows of {width:,} weights; the config is of another model")
    return found


def column_groups(parts: StoredMatrix, part: str, width: int, num_groups: int) -> torch.Tensor | None:
    """The group of each column, int64 [K], where the file says it. Raises UnknownModel for a group that is missing."""
    if not parts.has(part):
        return None
    found = parts.take(part, INTS, (width,)).long()
    if int(found.min()) == int(found.max()) == -1:
        return None  # written so by compressed-tensors for groups of neighbours
    if int(found.min()) < 0 or int(found.max()) >= num_groups:
        bad = int(found.min()) if int(found.min()) < 0 else int(found.max())
        raise parts.refuse(f"{part} names group {bad:,}, but there are {num_groups:,}")
    return found


SchemeOf = Callable[[Settings], Scheme]
