"""An EAGLE head (Li et al., 2024) as a guesser: one decoder layer over pairs of a feature and the next token.

The model's last hidden state f[t] and token t + 1 give an estimate of f[t + 1], and from it token t + 2; further tokens
follow from the head's own features. The head reads only the generated text, at most a window of it, and its logits are
of the tokens that were most frequent in training. ``runtime.training`` trains it.

    tokens     a   b   c   d                   features of a, b, c are the model's; d's is not computed yet
    the head   (fa, b) (fb, c) (fc, d) -> d's feature, next token e -> (d's feature, e) -> ...
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...kernels.linear import PackedLinear, Precision
from ...protocol.errors import InvalidParams
from ..layers.attention import Attention
from ..layers.batch import ForwardBatch
from ..layers.linear import Linear
from ..layers.mlp import MLP
from ..layers.norm import RMSNorm
from ..layers.rotary import cos_sin_table
from ..memory import KVPool

if TYPE_CHECKING:
    from ..models import Model

FORMAT = "phloem eagle head 1"
MAX_SEQUENCES = 8
MAX_LEN = 2048  # positions of a sequence's KV; at half of it the context starts again


class EagleShape(msgspec.Struct, frozen=True):
    """The metadata of a head's file. ``vocab_hash`` is the vocabulary's hash."""

    vocab_hash: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    format: str = FORMAT

    def tensor_shapes(self, num_tokens: int) -> dict[str, tuple[int, ...]]:
        c, inner = self.hidden_size, self.intermediate_size
        q_len, kv_len = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "feature.weight": (c, c),
            "token.weight": (c, c),
            "attention_norm.weight": (c,),
            "qkv.weight": (q_len + 2 * kv_len, c),
            "output.weight": (c, q_len),
            "mlp_norm.weight": (c,),
            "gate_up.weight": (2 * inner, c),
            "down.weight": (c, inner),
            "norm.weight": (c,),
            "head.weight": (num_tokens, c),
        }


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A loaded head, on its model's device."""

    shape: EagleShape
    token_ids: np.ndarray  # int64 [N], ascending: the tokens of its logits
    embedding: Tensor  # [V, C], the model's
    feature: PackedLinear
    token: PackedLinear
    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: MLP
    norm: RMSNorm
    head: PackedLinear
    cos_sin: Tensor

    def forward(self, features: Tensor, token_ids: Tensor, batch: ForwardBatch, kv: KVPool) -> tuple[Tensor, Tensor]:
        """The next feature [1, C] and logits float32 [1, N] after the last of ``features`` [T, C] and tokens [T]."""
        x, residual = self.feature(features), self.token(self.embedding[token_ids]).float()
        x, residual = self.attention_norm(x, residual)
        x = self.attention(x, batch, kv, self.cos_sin)[-1:]
        x, residual = self.mlp_norm(x, residual[-1:])
        x, _ = self.norm(self.mlp(x), residual)
        return x, self.head(x)


def load_eagle(path: Path, model: Model, *, vocab_hash: str) -> EagleHead:
    """Load the head in ``path`` for ``model``. Raises InvalidParams if it does not belong to the model."""
    where = f"draft_model='eagle:{path}'"
    try:
        with safe_open(str(path), framework="pt") as file:
            found = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InvalidParams(f"{where}: {error}", where="draft_model") from error
    if found.get("format") != FORMAT:
        message = f"{where}: not a head made by `phloem train-drafter` (its format is {found.get('format')!r})"
        raise InvalidParams(message, where="draft_model")
    shape = msgspec.convert(found, EagleShape, strict=False)
    config = model.config
    if shape.vocab_hash != vocab_hash or shape.hidden_size != config.hidden_size:
        message = f"{where} was trained for another model (hidden size {shape.hidden_size:,}); train one for this"
        raise InvalidParams(message, where="draft_model")
    token_ids = tensors.pop("token_ids", torch.zeros(0)).numpy().astype(np.int64)
    wanted = shape.tensor_shapes(len(token_ids))
    for name in wanted.keys() ^ tensors.keys():
        raise InvalidParams(f"{where}: tensor {name} is {'missing' if name in wanted else 'unknown'}")
    for name, size in wanted.items():
        if tuple(tensors[name].shape) != size:
            raise InvalidParams(f"{where}: tensor {name} is {tuple(tensors[name].shape)}, not {size}")
    return _assembled(shape, token_ids, tensors, model)


def _assembled(shape: EagleShape, token_ids: np.ndarray, tensors: dict[str, Tensor], model: Model) -> EagleHead:
    precision: Precision = "float32" if model.kv_dtype == torch.float32 else "int8"
    if model.device.type != "cpu":
        precision = "float32" if model.kv_dtype == torch.float32 else "bfloat16"
    eps = model.config.rms_norm_eps

    def linear(name: str, out_dtype: torch.dtype | None = None) -> PackedLinear:
        weight = tensors[f"{name}.weight"].float().to(model.device)
        return PackedLinear(weight, precision=precision, out_dtype=out_dtype)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(tensors[f"{name}.weight"].float().to(model.device), eps)

    attention = Attention(
        Linear([linear("qkv")]),
        Linear([linear("output")]),
        layer=0,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        window=shape.window,
    )
    return EagleHead(
        shape=shape,
        token_ids=token_ids,
        embedding=model.embedding.weight,
        feature=linear("feature"),
        token=linear("token"),
        attention_norm=norm("attention_norm"),
        attention=attention,
        mlp_norm=norm("mlp_norm"),
        mlp=MLP(Linear([linear("gate_up")]), Linear([linear("down")])),
        norm=norm("norm"),
        head=linear("head", torch.float32),
        cos_sin=cos_sin_table(model.config, MAX_LEN + 1, device=model.device),
    )


class _EagleContext:
    """The features of tokens [start, end) of a sequence; the first ``num_read`` of them are in the KV."""

    __slots__ = ("end", "guessed", "num_read", "row", "start", "unread")

    def __init__(self, row: int) -> None:
        self.row = row
        self.start = self.end = self.num_read = 0
        self.unread: list[Tensor] = []
        self.guessed: Tensor | None = None  # the head's feature of the last token, for the next call


class EagleGuesser:
    """Runs ``head`` on sequences. Owns the KV of its one layer for MAX_SEQUENCES sequences."""

    reads_features = True

    def __init__(self, head: EagleHead, model: Model) -> None:
        self.head = head
        self.token_ids: np.ndarray | None = head.token_ids
        self.max_len = model.max_positions
        self._device = model.device
        shape = head.shape
        self._kv = KVPool(
            1,
            MAX_SEQUENCES * MAX_LEN,
            shape.num_kv_heads,
            shape.head_dim,
            dtype=model.kv_dtype,
            device=model.device,
        )
        slots = torch.arange(MAX_SEQUENCES * MAX_LEN, dtype=torch.int32, device=model.device)
        self._table = slots.view(MAX_SEQUENCES, MAX_LEN)
        self._contexts: OrderedDict[int, _EagleContext] = OrderedDict()
        self._free = list(range(MAX_SEQUENCES))

    def read(self, seq_id: int, position: int, features: Tensor) -> None:
        """Take the model's features [n, C] of the tokens from ``position`` on. After a gap the context starts again."""
        context = self._contexts.get(seq_id)
        if context is None:
            if not self._free:
                self.forget(next(iter(self._contexts)))
            context = self._contexts[seq_id] = _EagleContext(self._free.pop())
        self._contexts.move_to_end(seq_id)
        if context.end != position or position + len(features) - context.start > MAX_LEN // 2:
            context.start = context.end = position
            context.num_read = 0
            context.unread.clear()
        context.unread.append(features)
        context.end += len(features)

    def num_unread(self, seq_id: int, tokens: np.ndarray) -> int:
        context = self._contexts.get(seq_id)
        if context is None or context.end != len(tokens) - 1:
            return 0
        return context.end - context.start - context.num_read

    @torch.inference_mode()
    def logits(self, seq_id: int, tokens: np.ndarray) -> Tensor:
        context = self._contexts[seq_id]
        length = context.end - context.start
        if len(tokens) - 1 == context.end:
            features = torch.cat(context.unread) if len(context.unread) > 1 else context.unread[0]
            first = context.num_read
            context.num_read = length
            context.unread.clear()
        else:
            assert context.guessed is not None
            features, first = context.guessed, len(tokens) - 2 - context.start
        count = len(features)
        positions = torch.arange(first, first + count)
        starts, ends = torch.tensor([0, count], dtype=torch.int32), torch.tensor([first + count], dtype=torch.int32)
        ids = torch.from_numpy(tokens[len(tokens) - count :].astype(np.int64))
        device = self._device
        batch = ForwardBatch(
            token_ids=ids.to(device),
            positions=positions.to(device),
            out_slots=(positions + context.row * MAX_LEN).to(device),
            row_ids=torch.tensor([context.row], dtype=torch.int32, device=device),
            query_starts=starts.to(device),
            kv_lens=ends.to(device),
            slot_table=self._table,
            logits_rows=torch.tensor([count - 1], device=device),
        )
        context.guessed, logits = self.head.forward(features, batch.token_ids, batch, self._kv)
        return logits

    def forget(self, seq_id: int) -> None:
        context = self._contexts.pop(seq_id, None)
        if context is not None:
            self._free.append(context.row)
