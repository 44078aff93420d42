"""Linear layers whose weights are laid out for the machine's matrix kernels. Never reads a file."""

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .machine import has_bfloat16_products, has_int4_products

Precision = Literal["auto", "float32", "bfloat16", "int4"]
Group32 = tuple[Tensor, Tensor, Tensor]  # q uint8 [N, K] of 0..15, scale and zero float32 [N, K / 32]

GROUP_LEN = 32
DEFAULT_INT4_ROWS = 8  # measured on two AVX-512 cores: 4-bit weights win below, bfloat16 from about 12 rows


class Product(Protocol):
    """``x [T, K] -> [T, N]`` by one kernel, weights and bias inside."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def describe(self) -> str: ...


class PackedLinear:
    """``x [..., K] @ weight.T + bias -> [..., N]``, in ``out_dtype`` or x's.

    ``weight`` is [N, K], or [N, K] in 4-bit groups of 32: ``w = (q - 8) * scale + zero``. ``precision``: ``float32``
    is exact; ``bfloat16`` rounds weights and x; ``int4`` runs 4-bit groups as they are, and x rounded to bfloat16;
    ``auto`` keeps 4-bit groups twice, as they are for up to ``int4_rows`` rows and as bfloat16 for more, since a few
    rows cost what it takes to read the weights and many what it takes to multiply; other weights it takes as bfloat16.
    Where the machine lacks a kernel, 4-bit groups become bfloat16, and bfloat16 becomes float32. ``describe`` says
    what was taken.
    """

    def __init__(
        self,
        weight: Tensor | Group32,
        *,
        precision: Precision = "auto",
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        int4_rows: int = DEFAULT_INT4_ROWS,
    ) -> None:
        self.out_dtype = out_dtype
        self.shape = tuple((weight[0] if isinstance(weight, tuple) else weight).shape)  # (N, K)
        self.int4_rows = 0
        self._few: Product | None = None  # for up to int4_rows rows
        if isinstance(weight, tuple):
            if precision in ("auto", "int4") and _fits_int4(weight):
                self._few = Int4Product(weight, bias)
                self.int4_rows = int4_rows
            weight = dequantize(weight)
        elif precision == "int4":
            raise ValueError("int4 of a float weight: quantize it to (q, scale, zero) groups of 32 first")
        self._many: Product | None = None
        if self._few is None or precision == "auto":
            self._many = _float_product(weight, bias, precision)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x if x.ndim == 2 else x.reshape(-1, self.shape[1])
        product = self._many
        if product is None or (self._few is not None and flat.shape[0] <= self.int4_rows):
            assert self._few is not None
            product = self._few
        y = product(flat)
        if y.dtype != (self.out_dtype or x.dtype):
            y = y.to(self.out_dtype or x.dtype)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.shape[0])

    def describe(self) -> str:
        """Which kernel runs, and from how many rows on which other."""
        if self._many is None:
            assert self._few is not None
            return self._few.describe()
        if self._few is None:
            return self._many.describe()
        return f"{self._few.describe()} up to {self.int4_rows} rows, {self._many.describe()} beyond"


class FloatProduct:
    """torch's own product in the weight's type, on any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.contiguous()
        self.bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def describe(self) -> str:
        return str(self.weight.dtype).removeprefix("torch.")


class OneDnnProduct:
    """bfloat16 weights in oneDNN's own blocks: they stream in the order in which they are used."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # The batch size named here only picks a layout; 16 is as good as any at 1 to 256 rows.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16().contiguous(), 16)
        self.bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.weight, self.bias, "none", [], "")

    def describe(self) -> str:
        return "bfloat16 (oneDNN)"


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


def dequantize(weight: Group32) -> Tensor:
    """float32 [N, K]."""
    q, scale, zero = weight
    groups = (q.float() - 8).view(*scale.shape, GROUP_LEN)
    return (groups * scale.unsqueeze(-1) + zero.unsqueeze(-1)).view(q.shape)


def _float_product(weight: Tensor, bias: Tensor | None, precision: Precision) -> Product:
    if precision == "float32":
        return FloatProduct(weight.float(), bias)
    if weight.device.type != "cpu":
        return FloatProduct(weight.bfloat16(), bias)
    if has_bfloat16_products():
        return OneDnnProduct(weight, bias)
    return FloatProduct(weight.bfloat16().float(), bias)


def _fits_int4(weight: Group32) -> bool:
    q = weight[0]
    return q.device.type == "cpu" and q.shape[0] % 16 == 0 and q.shape[1] % GROUP_LEN == 0 and has_int4_products()
