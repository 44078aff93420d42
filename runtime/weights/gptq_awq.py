"""GPTQ and AWQ checkpoints: words of 4- or 8-bit numbers, with scales and zero points for groups of inputs.

GPTQ (Frantar et al., 2023) as AutoGPTQ and GPTQModel write it, AWQ (Lin et al., 2024) in AutoAWQ's ``gemm`` layout:

    w[n, k] = (q[n, k] - zero[g, n]) * scale[g, n],  g the group of input k

    GPTQ   qweight [K * bits / 32, N]: words of neighbouring inputs   qzeros [G, N * bits / 32]   g_idx [K]
    AWQ    qweight [K, N / 8]: words of outputs 0 2 4 6 1 3 5 7       qzeros [G, N / 8], in the same order
"""

import torch

from ..quant import GroupTensor, group_tensor
from .packed_parts import FLOATS, Settings, StoredMatrix, column_groups, group_len_of, unpack_words

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_WORDS = (torch.int32,)


class Gptq:
    parts = ("qweight", "qzeros", "scales", "g_idx")
    marks = ("qweight",)

    def __init__(self, settings: Settings) -> None:
        self.bits = settings.choice("bits", (2, 4, 8))
        self.group_size = settings.size("group_size")
        settings.choice("desc_act", (True, False), False)
        settings.choice("sym", (True, False), True)
        settings.choice("is_marlin_format", (False, None))
        form = settings.choice("checkpoint_format", ("gptq", "gptq_v2", None))
        rules = settings.data.get("dynamic") or {}
        if not isinstance(rules, dict) or any(not str(rule).startswith("-") for rule in rules):
            raise settings.unsupported("dynamic", rules, "read are only rules that leave modules out")
        # The first version stores each zero point less 1.
        self.below = 0 if form == "gptq_v2" else 1
        self.label = f"GPTQ of {self.bits} bits"

    def matrix(self, parts: StoredMatrix) -> GroupTensor | torch.Tensor:
        count = 32 // self.bits
        words = parts.take("qweight", _WORDS, (None, None))
        width, num_rows = words.shape[0] * count, words.shape[1]
        num_groups = -(-width // group_len_of(parts, self.group_size, width))
        scale = parts.take("scales", FLOATS, (num_groups, num_rows))
        zeros = parts.take("qzeros", _WORDS, (num_groups, -(-num_rows // count)))
        zero = (unpack_words(zeros, self.bits)[:, :num_rows] + self.below) & ((1 << self.bits) - 1)
        group_ids = column_groups(parts, "g_idx", width, num_groups)
        q = unpack_words(words.T, self.bits)
        return group_tensor(q, scale.T, zero.T, bits=self.bits, group_ids=group_ids)


class Awq:
    parts = ("qweight", "qzeros", "scales")
    marks = ("qweight",)

    def __init__(self, settings: Settings) -> None:
        bits = "w_bit" if "w_bit" in settings.data else "bits"
        settings.choice(bits, (4,))
        group_size = "q_group_size" if "q_group_size" in settings.data else "group_size"
        self.group_size = settings.size(group_size)
        settings.choice("zero_point", (True,), True)
        version = settings.data.get("version", "gemm")
        if str(version).lower() != "gemm":
            raise settings.unsupported("version", version, "read is 'gemm'")
        self.label = "AWQ of 4 bits"

    def matrix(self, parts: StoredMatrix) -> GroupTensor | torch.Tensor:
        words = parts.take("qweight", _WORDS, (None, None))
        width, num_rows = words.shape[0], 8 * words.shape[1]
        num_groups = -(-width // group_len_of(parts, self.group_size, width))
        scale = parts.take("scales", FLOATS, (num_groups, num_rows))
        zeros = parts.take("qzeros", _WORDS, (num_groups, words.shape[1]))
        q, zero = (unpack_words(part, 4, order=_AWQ_ORDER).T.contiguous() for part in (words, zeros))
        return group_tensor(q, scale.T, zero, bits=4)
