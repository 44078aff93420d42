"""Linear layers whose weights are packed for the machine's matrix kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from ..cpu_isa import isa
from .backend import dense_product, quantized_product, reads_packed
from .cpu import bfloat, integer, packing, word_product
from .cpu.likeliest import LikeliestOutputs
from .cpu.llvm import LANES
from .cpu.word_product import Columns
from .quantized_weight import QuantizedWeight, pack_fp8, pack_int4, pack_int8
from .quantized_weight import dequantize as dequantize_packed

Precision = Literal["auto", "float32", "bfloat16", "int4", "int8", "int16", "fp8"]
Group32 = tuple[Tensor, Tensor, Tensor]  # q uint8 [N, K] of 0..15, scale and zero float32 [N, K / 32]
Bytes32 = tuple[Tensor, Tensor]  # q int8 [N, K], scale float32 [N, K / 32]

GROUP_LEN = 32
BLOCK_LEN = LANES  # outputs that lie together in packed weights


class Product(Protocol):
    """``x [T, K] -> [T, N]`` by one kernel; it holds weights and bias."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def describe(self) -> str: ...


class PackedLinear:
    """``x [..., K] @ weight.T + bias -> [..., N]``, in ``out_dtype`` or x's.

    ``weight`` is floats [N, K], or 4-bit groups of 32, ``w = (q - 8) * scale + zero``, or 8-bit groups of 32,
    ``w = q * scale``. By ``precision``:

    - ``float32`` is exact;
    - ``bfloat16`` rounds weights and x to bfloat16, and results too unless ``out_dtype`` is float32;
    - ``int4`` multiplies 4-bit groups without unpacking them, with x rounded to bfloat16;
    - ``int8`` rounds float weights and x to 8 bits, each with a scale for every 32 neighbours (weights of a Q8_0 file
      stay exact). 4-bit groups stay packed: only x is rounded. A row's result does not depend on the number of rows;
    - ``int16`` is ``int8`` with x rounded to 16 bits: nearly exact, for twice the arithmetic. Few rows take no longer;
    - ``fp8`` rounds float weights to 8-bit floats (e4m3) with a scale for 128 or 32 neighbours, and x to bfloat16;
    - ``auto`` is ``int8`` for 4-bit groups and ``bfloat16`` for other weights. With AMX it rounds x to 16 bits
      beside groups of 4 and 8 bits, with a scale for each row, which there takes no longer.

    On a GPU packed weights stay packed and x is rounded to bfloat16, for any number of rows.

    Without torch's 4-bit products ``int4`` becomes ``bfloat16``, and so do groups whose scale float16 cannot hold; on a
    CPU without bfloat16 products bfloat16 weights are multiplied as float32. ``describe`` names the kernel chosen.
    """

    def __init__(
        self,
        weight: Tensor | Group32 | Bytes32,
        *,
        precision: Precision = "auto",
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.out_dtype = out_dtype
        self.shape = tuple((weight[0] if isinstance(weight, tuple) else weight).shape)  # (N, K)
        self._product: Product = self._product_of(weight, precision, bias)

    @classmethod
    def of_packed(cls, weight: PackedBytes, *, out_dtype: torch.dtype | None = None) -> Self:
        """The product of ``packed`` of another one."""
        made = cls.__new__(cls)
        made.out_dtype, made.shape = out_dtype, weight.shape
        made._product = BytesProduct(weight, out_dtype)
        return made

    @property
    def quantized(self) -> QuantizedWeight | None:
        """The weights, where a GPU's kernel unpacks them."""
        return self._product.weight if isinstance(self._product, PackedProduct) else None

    @property
    def packed(self) -> PackedBytes | None:
        """The weights, where the CPU's products of bytes hold them."""
        return self._product.weight if isinstance(self._product, BytesProduct) else None

    def _product_of(self, weight: Tensor | Group32 | Bytes32, precision: Precision, bias: Tensor | None) -> Product:
        packed = _packed(weight, precision)
        if packed is not None:
            return PackedProduct(packed, bias, self.out_dtype)
        if isinstance(weight, tuple) and len(weight) == 2:
            by_bytes = precision in ("int8", "int16") or (precision == "auto" and isa().has_tiles)
            if by_bytes and _fits_bytes(*weight):
                return BytesProduct(pack_bytes(weight, precision, bias), self.out_dtype)
            weight = _dequantize_bytes(*weight)
        if isinstance(weight, tuple):
            if precision in ("auto", "int8", "int16") and _fits_bytes(*weight):
                return BytesProduct(pack_bytes(weight, precision, bias), self.out_dtype)
            if precision == "int4" and _fits_int4(weight):
                return Int4Product(weight, bias)
            weight = dequantize(weight)
        elif precision == "int4":
            raise ValueError("int4 of a float weight: quantize it to (q, scale, zero) groups of 32 first")
        elif precision in ("int8", "int16") and self.shape[1] % GROUP_LEN == 0:
            groups = quantize_int8(weight)
            if _fits_bytes(*groups):
                return BytesProduct(pack_bytes(groups, precision, bias), self.out_dtype)
        elif precision == "fp8" and self.shape[1] % GROUP_LEN == 0:
            weight = dequantize_packed(_pack_fp8(weight))  # no kernel here, the same weights
        return _float_product(weight, bias, precision, self.out_dtype)

    def __call__(self, x: Tensor | Columns) -> Tensor:
        if isinstance(x, Columns):
            return self._of_columns(x)
        flat = x if x.ndim == 2 else x.reshape(-1, self.shape[1])
        y = self._product(flat)
        if y.dtype != (self.out_dtype or x.dtype):
            y = y.to(self.out_dtype or x.dtype)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.shape[0])

    def _of_columns(self, x: Columns) -> Tensor:
        assert isinstance(self._product, BytesProduct) and self.out_dtype is not None
        product = self._product.product
        assert isinstance(product, word_product.WordProduct)
        return product(x, self.out_dtype)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Writes the results of x [T, K] to ``out`` [T, N], which may be columns of a larger tensor."""
        if not (isinstance(self._product, BytesProduct) and self._product.write(x, out)):
            out.copy_(self._product(x))

    @property
    def can_pick(self) -> bool:
        return isinstance(self._product, BytesProduct)

    def pick(self, x: Tensor, blocks: Tensor, out: Tensor | None = None) -> Tensor:
        """The results of x [T, K] for outputs [16 b, 16 b + 16) of each of ``blocks`` (int32), equal to the bit.

        Other outputs are not computed, and their values mean nothing. Written to ``out`` [T, N] if given. Only where
        ``can_pick``.
        """
        assert isinstance(self._product, BytesProduct)
        return self._product.pick(x, blocks, out)

    def likeliest(self, num_tokens: int) -> LikeliestOutputs | None:
        """The highest of the first ``num_tokens`` outputs, to the same equal ones, for less than all outputs cost; None
        where that cannot be."""
        product = self._product
        if not isinstance(product, BytesProduct) or self.out_dtype != torch.float32:
            return None
        weight = product.weight
        if (weight.bits, weight.x_bits) != (8, 16):
            return None
        return LikeliestOutputs(weight.records, weight.shape[0], bias=weight.bias, num_tokens=num_tokens)

    def gated(self, x: Tensor, gate: word_product.Gate, then: PackedLinear) -> Columns | None:
        """The activations of the first half of these results times the second half, as ``then`` reads them: its
        results are equal to the bit to one done after the other. None where the products cannot join.
        """
        if type(self) is not PackedLinear or type(then) is not PackedLinear:
            return None  # a subclass looks at its inputs
        if self.out_dtype != torch.float32 or then.out_dtype is None:
            return None
        mine, other = self._product, then._product
        if not (isinstance(mine, BytesProduct) and isinstance(other, BytesProduct)):
            return None
        first, second = mine.product, other.product
        if not (isinstance(first, word_product.WordProduct) and isinstance(second, word_product.WordProduct)):
            return None
        return first.gated(x, gate) if first.can_gate else None

    @property
    def has_rows(self) -> bool:
        """Whether ``rows`` can return the exact weights from their packed form."""
        return isinstance(self._product, BytesProduct) and self._product.bits == 8

    def rows(self, ids: Tensor, dtype: torch.dtype, *, out: Tensor | None = None, also: Tensor | None = None) -> Tensor:
        """Weights [T, K] of outputs ``ids`` (int64 [T]), as ``packing.packed_rows``. Only where ``has_rows``."""
        assert isinstance(self._product, BytesProduct)
        weight = self._product.weight
        words = weight.x_bits == 0
        return packing.packed_rows(weight.records, self.shape[0], ids, dtype, words=words, out=out, also=also)

    @property
    def needs_torch_threads(self) -> bool:
        """Whether the product is torch's own, which is slow where torch has one thread."""
        return isinstance(self._product, FloatProduct | OneDnnProduct | Int4Product)

    def describe(self) -> str:
        """The kernel that runs."""
        return self._product.describe()


class PackedProduct:
    """4- and 8-bit weights, which a GPU's kernel unpacks in registers."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        return quantized_product(x, self.weight, bias=self.bias, out_dtype=self.out_dtype)

    def describe(self) -> str:
        return f"{self.weight.kind} packed"


class FloatProduct:
    """A product in the weight's type, on any device: torch's own, unless the device has a kernel for so few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.contiguous()
        self.bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return dense_product(x.to(self.weight.dtype), self.weight, bias=self.bias)

    def describe(self) -> str:
        return str(self.weight.dtype).removeprefix("torch.")


class OneDnnProduct:
    """bfloat16 weights in oneDNN's blocks, so that they are read in the order in which they lie."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # The batch size given here only chooses a layout; 16 is as good as any for 1 to 256 rows.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16().contiguous(), 16)
        self.bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.weight, self.bias, "none", [], "")

    def describe(self) -> str:
        return "bfloat16 (oneDNN)"


class WideProduct:
    """bfloat16 weights with float32 results, for logits, which bfloat16 rounds too much. oneDNN has no such product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        bias = None if bias is None else bias.float().contiguous()
        self.product = bfloat.Bfloat16Product(bfloat.pack_bfloat16(weight), weight.shape[0], bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, torch.float32)

    def describe(self) -> str:
        return "bfloat16 to float32"


class Int4Product:
    """4-bit groups of 32 in torch's layout, x in bfloat16."""

    def __init__(self, weight: Group32, bias: Tensor | None) -> None:
        q, scale, zero = weight
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        self.scale_zero = torch.stack((scale.T, zero.T), dim=-1).bfloat16().contiguous()  # [K / 32, N, 2]
        self.bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self.weight, GROUP_LEN, self.scale_zero)
        return y if self.bias is None else y.add_(self.bias)

    def describe(self) -> str:
        return "int4"


@dataclass(frozen=True, slots=True)
class PackedBytes:
    """4- or 8-bit weights [N, K] in groups of 32, as our products hold them (``kernels/cpu/packing.py``).

    ``x_bits``: to how many bits the product rounds x, in groups of 32; 0: to bfloat16, and the weights too.
    ``records``: uint8 [blocks of 16 outputs, groups, record], of ``packing.to_words`` where ``x_bits`` is 0.
    """

    shape: tuple[int, int]
    bits: Literal[4, 8]
    x_bits: Literal[0, 8, 16]
    records: Tensor
    bias: Tensor | None  # float32 [N]

    @property
    def layout(self) -> tuple[int, int, int]:
        """The shape that ``records`` must have."""
        return -(-self.shape[0] // BLOCK_LEN), self.shape[1] // GROUP_LEN, packing.record_len(self.bits)


def pack_bytes(weight: Group32 | Bytes32, precision: Precision, bias: Tensor | None) -> PackedBytes:
    records = packing.pack_int4(*weight) if len(weight) == 3 else packing.pack_int8(*weight)
    num_outputs, width = weight[0].shape
    return packed_bytes(records, (num_outputs, width), precision, bias)


def packed_bytes(records: Tensor, shape: tuple[int, int], precision: Precision, bias: Tensor | None) -> PackedBytes:
    """``pack_bytes`` of records that ``packing.pack_int4`` or ``pack_int8`` made; takes the records."""
    x_bits: Literal[0, 8, 16] = 16 if precision == "int16" else 0 if precision == "auto" and isa().has_tiles else 8
    bits: Literal[4, 8] = 4 if records.shape[-1] == packing.record_len(4) else 8
    bias = None if bias is None else bias.float().contiguous()
    return PackedBytes(shape, bits, x_bits, records if x_bits else packing.to_words(records), bias)


class BytesProduct:
    """4- or 8-bit weights in groups of 32, float32 sums.

    x is rounded to 8 or 16 bits in groups of 32; with ``auto`` and AMX, x and the weights to bfloat16.
    """

    def __init__(self, weight: PackedBytes, out_dtype: torch.dtype | None) -> None:
        self.weight = weight
        self.bits = bits = weight.bits
        self.out_dtype = out_dtype
        records, num_outputs, bias = weight.records, weight.shape[0], weight.bias
        self.product: word_product.WordProduct | integer.IntegerProduct
        if weight.x_bits == 0:
            self.product = word_product.WordProduct(records, num_outputs, bits=bits, bias=bias)
            self.name = f"int{bits} by bfloat16 (AMX)"
            return
        self.product = integer.IntegerProduct(records, num_outputs, bits=bits, x_bits=weight.x_bits, bias=bias)
        self.name = f"int{bits} by int{weight.x_bits}"

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self._dtype_for(x))

    def write(self, x: Tensor, out: Tensor) -> bool:
        """Writes the results to ``out`` [T, N], columns of a larger tensor; False if its type is another."""
        if out.dtype != self._dtype_for(x):
            return False
        self.product(x, out.dtype, out=out)
        return True

    def pick(self, x: Tensor, blocks: Tensor, out: Tensor | None = None) -> Tensor:
        return self.product(x, self._dtype_for(x), blocks=blocks, out=out)

    def _dtype_for(self, x: Tensor) -> torch.dtype:
        return self.out_dtype or (x.dtype if x.dtype == torch.bfloat16 else torch.float32)

    def describe(self) -> str:
        return self.name


def quantize_int8(weight: Tensor) -> Bytes32:
    """``(q int8 [N, K], scale float32 [N, K / 32])`` with ``w = q * scale``; exact for the weights of a Q8_0 file."""
    groups = weight.float().view(weight.shape[0], -1, GROUP_LEN)
    scale = groups.abs().amax(dim=-1) / 127
    steps = groups / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return steps.round().to(torch.int8).view(weight.shape), scale


def _dequantize_bytes(q: Tensor, scale: Tensor) -> Tensor:
    groups = q.float().view(*scale.shape, GROUP_LEN)
    return (groups * scale.unsqueeze(-1)).view(q.shape)


def dequantize(weight: Group32) -> Tensor:
    """float32 [N, K]."""
    q, scale, zero = weight
    groups = (q.float() - 8).view(*scale.shape, GROUP_LEN)
    return (groups * scale.unsqueeze(-1) + zero.unsqueeze(-1)).view(q.shape)


def _packed(weight: Tensor | Group32 | Bytes32, precision: Precision) -> QuantizedWeight | None:
    """The weight packed for a GPU's kernel; None if it is not to be packed, or has no such kernel."""
    values = weight[0] if isinstance(weight, tuple) else weight
    if precision == "float32" or not reads_packed(values.device) or values.shape[1] % GROUP_LEN:
        return None
    if isinstance(weight, tuple):
        if precision == "bfloat16":
            return None
        return pack_int4(*weight) if len(weight) == 3 else pack_int8(*weight)
    if precision in ("int8", "int16"):
        return pack_int8(*quantize_int8(weight))
    return _pack_fp8(weight) if precision == "fp8" else None


def _pack_fp8(weight: Tensor) -> QuantizedWeight:
    return pack_fp8(weight, group_len=32 if weight.shape[1] % 128 else 128)


def _float_product(weight: Tensor, bias: Tensor | None, precision: Precision, out_dtype: torch.dtype | None) -> Product:
    if precision == "float32":
        return FloatProduct(weight.float(), bias)
    if weight.device.type != "cpu":
        return FloatProduct(weight.bfloat16(), bias)
    if out_dtype == torch.float32 and bfloat.has_bfloat16_pairs():
        return WideProduct(weight, bias)
    if has_bfloat16_products():
        return OneDnnProduct(weight, bias)
    return FloatProduct(weight.bfloat16().float(), bias)


def _fits_bytes(q: Tensor, *scales: Tensor) -> bool:
    """Whether byte products can take these groups; their scales become float16."""
    if q.device.type != "cpu" or q.shape[1] % GROUP_LEN:
        return False
    return all(float(scale.abs().max()) < torch.finfo(torch.float16).max for scale in scales if scale.numel())


def _fits_int4(weight: Group32) -> bool:
    q = weight[0]
    return q.device.type == "cpu" and q.shape[0] % 16 == 0 and q.shape[1] % GROUP_LEN == 0 and has_int4_products()


@cache
def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in bfloat16, not by way of float32."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    except (AttributeError, RuntimeError):
        return False


@cache
def has_int4_products() -> bool:
    """Whether torch has a vectorised product with 4-bit weights on this CPU."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.zeros(16, 32, dtype=torch.int32), 1)
        x, scale_zero = torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(1, 16, 2, dtype=torch.bfloat16)
        torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, scale_zero)
    except (AttributeError, RuntimeError):
        return False
    return True
