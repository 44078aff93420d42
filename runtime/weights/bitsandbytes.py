"""Checkpoints of bitsandbytes: 4-bit codes of a table (NF4, FP4; Dettmers et al., 2023), and LLM.int8.

4 bits   weight uint8 [N * K / 2, 1], the first number in the high half; weight.quant_map float32 [16];
         weight.absmax for each block of numbers, in the order of rows; weight.quant_state...: JSON with the sizes
         w = quant_map[q] * absmax
         where absmax is itself in bytes: absmax = nested_quant_map[a] * nested_absmax + nested_offset
8 bits   weight int8 [N, K]; SCB float32 [N]:  w = q * SCB / 127
"""

import torch

from ...protocol.errors import UnknownModel
from ..quant import GroupTensor, group_tensor
from .packed_parts import FLOATS, Settings, StoredMatrix

_STATE = "weight.quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_MOST_STATE_BYTES = 4096


class BitsAndBytes:
    parts = (
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        *(_STATE + kind for kind in _KINDS),
        "SCB",
        "weight_format",
    )
    marks = ("weight.absmax", "SCB")

    def __init__(self, settings: Settings) -> None:
        in_four = settings.choice("load_in_4bit", (True, False), False)
        in_eight = settings.choice("load_in_8bit", (True, False), False)
        if in_four == in_eight:
            raise settings.unsupported("load_in_4bit", in_four, "either it or load_in_8bit must be true")
        if in_four:
            settings.choice("bnb_4bit_quant_storage", ("uint8",), "uint8")
        self.label = "bitsandbytes of 4 bits" if in_four else "bitsandbytes of 8 bits"

    def matrix(self, parts: StoredMatrix) -> GroupTensor | torch.Tensor:
        return _bytes(parts) if parts.has("SCB") else _four_bits(parts)


def _bytes(parts: StoredMatrix) -> GroupTensor | torch.Tensor:
    q = parts.take("weight", (torch.int8,), (None, None))
    if parts.has("weight_format") and int(parts.take("weight_format", (torch.uint8,), ())) != 0:
        raise parts.refuse("its weight_format is not 0, rows; other orders are not read")
    scale = parts.take("SCB", FLOATS, (q.shape[0],)).float().unsqueeze(1) / 127
    return group_tensor((q.to(torch.int16) + 128).to(torch.uint8), scale, bits=8)


def _four_bits(parts: StoredMatrix) -> torch.Tensor:
    state = _state_of(parts)
    num_rows, width = _sizes(parts, state)
    count = num_rows * width
    block = _whole(parts, state, "blocksize")
    halves = parts.take("weight", (torch.uint8,), (-(-count // 2), 1)).view(-1)
    codes = parts.take("weight.quant_map", (torch.float32,), (16,))
    num_blocks = -(-count // block)
    if "nested_blocksize" in state:
        nested = _whole(parts, state, "nested_blocksize")
        stored = parts.take("weight.absmax", (torch.uint8,), (num_blocks,))
        table = parts.take("weight.nested_quant_map", (torch.float32,), (256,))
        outer = parts.take("weight.nested_absmax", (torch.float32,), (-(-num_blocks // nested),))
        offset = state.get("nested_offset")
        if not isinstance(offset, int | float):
            raise parts.refuse(f"nested_offset is {offset!r}; it must be a number")
        greatest = table[stored.long()] * outer.repeat_interleave(nested)[:num_blocks] + float(offset)
    else:
        greatest = parts.take("weight.absmax", (torch.float32,), (num_blocks,))
    numbers = torch.stack((halves >> 4, halves & 15), dim=1).view(-1)[:count]
    spread = greatest.repeat_interleave(block)[:count]
    return (codes[numbers.int()] * spread).view(num_rows, width)


def _state_of(parts: StoredMatrix) -> dict[str, object]:
    import msgspec

    for kind in _KINDS:
        if parts.has(_STATE + kind):
            raw = parts.take(_STATE + kind, (torch.uint8,), (None,))
            if len(raw) > _MOST_STATE_BYTES:
                raise parts.refuse(f"its quant_state has {len(raw):,} bytes; at most {_MOST_STATE_BYTES:,} are read")
            try:
                found = msgspec.json.decode(bytes(raw.tolist()))
            except msgspec.DecodeError as error:
                raise parts.refuse(f"its quant_state is no JSON: {error}") from error
            if isinstance(found, dict):
                return found
            raise parts.refuse("its quant_state is no JSON object")
    raise UnknownModel(f"{parts.source} has no tensor {parts.name(_STATE + _KINDS[0])}, which its quantization needs")


def _sizes(parts: StoredMatrix, state: dict[str, object]) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(s) is int and 0 < s < 1 << 31 for s in shape):
        raise parts.refuse(f"its shape is {shape!r}; it must be two numbers")
    return shape[0], shape[1]


def _whole(parts: StoredMatrix, state: dict[str, object], field: str) -> int:
    value = state.get(field)
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise parts.refuse(f"its {field} is {value!r}; it must be a number of at least 1")
    return value
