"""Matrix products with a model's weights, several stacked into one. ``PackedLinear`` chooses the kernel."""

from collections.abc import Sequence
from typing import Literal

import torch

from ...cpu_isa import isa
from ...kernels.backend import reads_packed
from ...kernels.linear import Columns, LikeliestOutputs, PackedBytes, PackedLinear, packed_bytes
from ..quant import (
    GROUP32_KINDS,
    GroupTensor,
    QuantTensor,
    Weight,
    pack_records,
    quantize_group32,
    repack_group32,
    round_to_bytes,
)
from ..weights.model_config import Activation
from .adapters import AdapterRows, LowRank

LinearPrecision = Literal["float32", "bfloat16", "int4", "int16", "fp8", "auto"]


class Linear:
    """``x @ weight.T + bias`` of weights stacked by rows: one product for neighbours of one precision."""

    def __init__(
        self, parts: Sequence[PackedLinear], out_dtype: torch.dtype | None = None, *, gain: float = 1.0
    ) -> None:
        """``gain``: what the weights and biases of ``parts`` were multiplied with."""
        self.parts = tuple(parts)
        self.gain = gain
        self.adapters: tuple[LowRank, ...] = ()
        self.out_dtype = out_dtype
        self._sizes = [part.shape[0] for part in parts]

    def __call__(self, x: torch.Tensor | Columns, rows: AdapterRows | None = None) -> torch.Tensor:
        """[T, K] -> [T, N]. ``Columns`` come from ``gated`` of another product, and without ``rows``."""
        y = self._product(x)
        if rows is not None:
            assert isinstance(x, torch.Tensor)
            for low_rank in self.adapters:
                low_rank.add(y, x, rows)
        return y

    def _product(self, x: torch.Tensor | Columns) -> torch.Tensor:
        if len(self.parts) == 1:
            return self.parts[0](x)
        assert isinstance(x, torch.Tensor)
        out = torch.empty((x.shape[0], sum(self._sizes)), dtype=self.out_dtype or x.dtype, device=x.device)
        for part, columns in zip(self.parts, out.split(self._sizes, dim=1), strict=True):
            part.write(x, columns)
        return out

    @property
    def can_pick(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].can_pick

    def pick(self, x: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``PackedLinear.pick``."""
        return self.parts[0].pick(x, blocks, out)

    def gated(self, x: torch.Tensor, gate: Activation, then: "Linear") -> Columns | None:
        """``PackedLinear.gated``; None where the products cannot join."""
        if len(self.parts) != 1 or len(then.parts) != 1 or gate == "gelu":
            return None
        return self.parts[0].gated(x, gate, then.parts[0])

    @property
    def has_rows(self) -> bool:
        """``PackedLinear.has_rows``, of its one part."""
        return len(self.parts) == 1 and self.parts[0].has_rows

    @property
    def needs_torch_threads(self) -> bool:
        return any(part.needs_torch_threads for part in self.parts)


class LMHead(Linear):
    """The product that makes logits, float32 [L, V]. With ``cap`` a logit becomes ``cap * tanh(logit / cap)``."""

    def __init__(self, linear: Linear, *, cap: float = 0.0) -> None:
        super().__init__(linear.parts, linear.out_dtype, gain=linear.gain)
        self.cap = cap

    def __call__(self, x: torch.Tensor | Columns, rows: AdapterRows | None = None) -> torch.Tensor:
        return self._capped(super().__call__(x, rows))

    def pick(self, x: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._capped(super().pick(x, blocks, out))

    def likeliest(self, num_tokens: int) -> LikeliestOutputs | None:
        """``PackedLinear.likeliest``. Not with a cap, which makes logits equal that were not."""
        return self.parts[0].likeliest(num_tokens) if len(self.parts) == 1 and not self.cap else None

    def write(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the logits of x [L, C] to ``out`` and returns it. Only for one part."""
        (part,) = self.parts
        part.write(x, out)
        return self._capped(out)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits


def stacked_linear(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor] | None = None,
    *,
    precision: LinearPrecision,
    device: torch.device | str = "cpu",
    out_dtype: torch.dtype | None = None,
    gain: float = 1.0,
    for_logits: bool = False,
) -> Linear:
    """One ``Linear`` of the weights, top to bottom, times ``gain``; its results are of ``out_dtype``, else of x's.

    ``auto`` keeps a file's quantisation: 4-bit groups as they are, other blocks as 8-bit groups, floats as bfloat16.
    ``int16`` does the same, with inputs rounded to 16 bits instead of 8. ``int4`` rounds every weight to 4 bits. In
    products ``for_logits`` 8-bit groups stay exact and inputs keep 16 bits: an error in logits could change the order
    of tokens, and for few rows 16 bits cost no time.
    """
    forms = [_form_of(weight, precision) for weight in weights]
    if for_logits:
        forms = ["int16" if form in ("auto", "int8") else form for form in forms]
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    parts: list[PackedLinear] = []
    start = 0
    for end in range(1, len(weights) + 1):
        if end < len(weights) and forms[end] == forms[start]:
            continue
        run, form = weights[start:end], forms[start]
        bias = None if biases is None else (torch.cat(list(biases[start:end])) * gain).to(dtype).to(device)
        if form == "groups":
            packed = _packed_groups(run, precision, gain, bias, device)
            if packed is not None:
                parts.append(PackedLinear.of_packed(packed, out_dtype=out_dtype))
            else:
                groups = _groups(run, gain, device)
                parts.append(PackedLinear(groups, precision=precision, bias=bias, out_dtype=out_dtype))
        elif form in ("auto", "int8", "int16"):
            parts.append(PackedLinear(_bytes(run, gain, device), precision=form, bias=bias, out_dtype=out_dtype))
        else:
            parts.append(PackedLinear(_floats(run, form, gain, device), precision=form, bias=bias, out_dtype=out_dtype))
        start = end
    return Linear(parts, out_dtype, gain=gain)


def as_float(weight: Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The file's weight: exact in float32, rounded once in another type."""
    return weight.to(dtype) if isinstance(weight, torch.Tensor) else weight.dequantize(dtype)


Form = Literal["groups", "auto", "int8", "int16", "fp8", "bfloat16", "float32"]


def _form_of(weight: Weight, precision: LinearPrecision) -> Form:
    """The form in which ``PackedLinear`` gets a weight, 4-bit groups or floats, and at which precision."""
    if precision == "int4":
        return "groups"
    if precision in ("float32", "bfloat16", "fp8"):
        return precision
    if isinstance(weight, torch.Tensor):
        return "bfloat16"
    if bits_of(weight) == 4:
        return "groups"
    if precision == "auto" and isa().has_tiles:
        return "auto"
    return "int16" if precision == "int16" else "int8"


def bits_of(weight: Weight) -> Literal[4, 8, 16]:
    """The bits of a weight as CPU kernels hold it at precision ``auto``."""
    if isinstance(weight, torch.Tensor):
        return 16
    is_four = weight.bits == 4 if isinstance(weight, GroupTensor) else weight.kind in GROUP32_KINDS
    return 4 if is_four else 8


def _packed_groups(
    weights: Sequence[Weight],
    precision: LinearPrecision,
    gain: float,
    bias: torch.Tensor | None,
    device: torch.device | str,
) -> PackedBytes | None:
    """A file's blocks of 4 bits as ``PackedLinear`` would pack ``_groups`` of them, in one pass; None elsewhere."""
    if precision not in ("auto", "int16") or torch.device(device).type != "cpu":
        return None
    if reads_packed(device):
        return None
    blocks = [weight for weight in weights if isinstance(weight, QuantTensor)]
    records = pack_records(blocks, gain=gain) if len(blocks) == len(weights) else None
    if records is None:
        return None
    return packed_bytes(records, (sum(weight.shape[0] for weight in blocks), blocks[0].shape[1]), precision, bias)


def _groups(
    weights: Sequence[Weight], gain: float, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, scale, zero = (_joined(pieces).to(device) for pieces in zip(*map(_as_groups, weights), strict=True))
    return q, scale * gain, zero * gain


def _as_groups(weight: Weight) -> tuple[torch.Tensor, ...]:
    if bits_of(weight) != 4 or isinstance(weight, torch.Tensor):
        return quantize_group32(as_float(weight))
    return weight.parts32() if isinstance(weight, GroupTensor) else repack_group32(weight)


def _bytes(weights: Sequence[Weight], gain: float, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    made = [
        weight.parts32() if isinstance(weight, GroupTensor) else round_to_bytes(weight)
        for weight in weights
        if not isinstance(weight, torch.Tensor)
    ]
    q, scale = (_joined(pieces).to(device) for pieces in zip(*made, strict=True))
    return q, scale * gain


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _floats(weights: Sequence[Weight], form: Form, gain: float, device: torch.device | str) -> torch.Tensor:
    # 8-bit groups are made from the exact weights: where the file holds such groups, the result is equal to them.
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    made = [as_float(weight, dtype if gain == 1.0 else torch.float32) for weight in weights]
    if gain != 1.0:
        made = [(weight * gain).to(dtype) for weight in made]
    return (made[0] if len(made) == 1 else torch.cat(made)).to(device)
