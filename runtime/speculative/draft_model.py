"""A draft model: a smaller model with the same vocabulary, or the model itself with fewer layers.

It owns its KV and remembers the tokens that it has read of each sequence, so it reads only new tokens, and only when it
is asked for a draft.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...radix_cache.tree import common_prefix_len
from ..executor import Executor
from ..layers.adapters import AdapterNames
from ..memory import KVPool
from ..scheduler import PlanRow, StepPlan

if TYPE_CHECKING:
    from ..models import Model

MAX_SEQUENCES = 4  # with a context; a further one replaces the least recently used
MAX_LEN = 4096
_CHUNK = 256


class _DraftContext:
    """The tokens of one sequence that the model has read, in one row of the slot table."""

    __slots__ = ("num_read", "read", "row", "synced")

    def __init__(self, row: int, max_len: int) -> None:
        self.row = row
        self.read = np.zeros(max_len, np.int32)
        self.num_read = 0
        self.synced = 0


class DraftModel:
    """Sequences of at most ``max_len`` tokens; a context of the longest takes ``max_len`` slots of its pool."""

    def __init__(
        self, model: Model, *, max_len: int, num_tokens: int = 0, adapters: AdapterNames | None = None
    ) -> None:
        """``num_tokens``: tokens of the vocabulary; logits beyond it are padding. 0: all are tokens. ``adapters``:
        those of the target, whose texts are drafted with the draft model's adapter of the same name, where it has one.
        None: the target has the same adapters.
        """
        self.model = model
        self._adapters = model.adapters if adapters is None else adapters
        self.num_tokens = num_tokens or model.config.vocab_size
        self.max_len = min(max_len, model.max_positions, MAX_LEN)
        shape = model.config
        kv = KVPool(
            1 + max(layer.attention.layer for layer in model.layers),
            MAX_SEQUENCES * self.max_len + 1,  # on a GPU the executor owns the last
            shape.num_kv_heads,
            shape.head_dim,
            dtype=model.kv_dtype,
            device=model.device,
            has_values=shape.slot_vectors > 1,
        )
        self._executor = Executor(model, kv, max_rows=MAX_SEQUENCES, max_len=self.max_len)
        self._contexts: OrderedDict[int, _DraftContext] = OrderedDict()
        self._free = list(range(MAX_SEQUENCES))

    def num_unread(self, seq_id: int, tokens: np.ndarray) -> int:
        context = self._contexts.get(seq_id)
        return len(tokens) - (0 if context is None else _num_known(context, tokens))

    def logits(self, seq_id: int, tokens: np.ndarray, adapter: int = -1) -> torch.Tensor:
        """Logits [1, V] after ``tokens`` (int32, at most ``max_len``). Reads only the tokens that the context lacks.
        ``adapter``: that of the sequence, by the target's number.
        """
        context = self._contexts.get(seq_id)
        if context is None:
            if not self._free:
                self.forget(next(iter(self._contexts)))
            context = self._contexts[seq_id] = _DraftContext(self._free.pop(), self.max_len)
        self._contexts.move_to_end(seq_id)
        known = _num_known(context, tokens)
        own = self._own_adapter(adapter)
        first_slot = context.row * self.max_len
        for start in range(known, len(tokens), _CHUNK):
            end = min(start + _CHUNK, len(tokens))
            slots = np.arange(first_slot, first_slot + end, dtype=np.int32)
            num_logits = 1 if end == len(tokens) else 0
            stale_from = min(context.synced, start)
            row = PlanRow(0, context.row, start, tokens[start:end], slots, stale_from, num_logits, adapter=own)
            found = self._executor.forward(StepPlan(0, (row,)))
            context.synced = max(context.synced, end)
        context.read[known : len(tokens)] = tokens[known:]
        context.num_read = len(tokens)
        return found.whole()[:, : self.num_tokens]

    def _own_adapter(self, number: int) -> int:
        """The draft model's number of the target's adapter ``number``; -1: it has none for it."""
        if number < 0 or self._adapters is self.model.adapters:
            return number
        name, own = self._adapters.names[number], self.model.adapters.names
        return own.index(name) if name in own else -1

    def forget(self, seq_id: int) -> None:
        context = self._contexts.pop(seq_id, None)
        if context is not None:
            self._free.append(context.row)


def _num_known(context: _DraftContext, tokens: np.ndarray) -> int:
    """How many of ``tokens`` the context has. The last token is always read again, for its logits."""
    return min(common_prefix_len(context.read[: context.num_read], tokens), len(tokens) - 1)


def without_layers(model: Model, keep: int) -> Model:
    """``model`` with ``keep`` of its layers: the first two thirds of them from its beginning, the rest from its end.

    It shares the model's weights. (Zhang et al., 2023, Draft & Verify, search for the best layers to leave out.)
    """
    first = -(-2 * keep // 3)
    return replace(model, layers=(*model.layers[:first], *model.layers[len(model.layers) - (keep - first) :]))
