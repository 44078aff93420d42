"""Decode steps as CUDA graphs: one for each number of rows, rounded up, and each width of the slot table.

Steps whose rows share prefixes have graphs of their own, with one more kernel in each layer. Steps with adapters have
theirs too: each row's adapter is copied in, and the adapters' tables are read where they lie, so these graphs are
dropped once tables are made anew. A graph is captured when its size first occurs. It runs from the embedding to the
last norm; the head runs after it, so all graphs share their memory and none holds logits. Padding rows write to the
executor's spare slot. Only a capture waits for the device.

The ranks of a split model capture a graph at the same step, as what chooses one is equal on all of them: a capture runs
the layers once more than a replay, and with them the sums that join the ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..layers.batch import ForwardBatch, StepArrays
from .accelerator import DeviceGraph
from .device_batch import DeviceBatch, decode_size_bytes, shared_views
from .prefixes import Prefixes, shared_size

if TYPE_CHECKING:
    from ..memory import KVPool
    from ..models import Model

LEAST_WIDTH = 512  # positions; wider tables are powers of two, so that the attention grid fits the contexts


def ladder(max_rows: int) -> tuple[int, ...]:
    """The numbers of rows that have graphs. Padding rows: at most 7 up to 64 rows, 15 up to 256, 31 beyond."""
    sizes = [*(1, 2, 4, 8), *range(16, 64, 8), *range(64, 256, 16), *range(256, 1024, 32)]
    last = min(max_rows, sizes[-1])
    return (*(size for size in sizes if size < last), last)


class GraphKey(NamedTuple):
    num_rows: int
    width: int  # of the slot table
    shares: bool  # prefixes
    has_adapters: bool


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    graph: DeviceGraph
    hidden: torch.Tensor  # [rows, C]


class DecodeGraphs:
    """Owns the graphs of one model and pool, and the buffer of integers that all of them read."""

    def __init__(self, model: Model, kv: KVPool, inputs: DeviceBatch) -> None:
        self._model, self._kv, self._inputs = model, kv, inputs
        self.sizes = ladder(inputs.max_rows)
        device = inputs.accelerator.device
        self._static = torch.zeros(decode_size_bytes(self.sizes[-1]), dtype=torch.uint8, device=device)
        self._starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(self.sizes[-1], dtype=torch.int64, device=device)
        self._shared = torch.zeros(4 * shared_size(self.sizes[-1]), dtype=torch.uint8, device=device)
        self._written: tuple[Prefixes | None, int] = (None, 0)  # the content of ``_shared``, and its number of rows
        self._adapters = torch.full(self._rows.shape, -1, dtype=torch.int64, device=device)
        self._num_moves = 0  # of the adapters' tables, at which graphs with adapters were captured
        self._captured: dict[GraphKey, CapturedGraph] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def forward(self, step: StepArrays) -> torch.Tensor | None:
        """The head's input [R, C]. None if a row has several tokens or no logits, or if there are too many rows."""
        num_rows = len(step.row_ids)
        if not step.is_decode or num_rows > self.sizes[-1]:
            return None
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        width = self._width(int(step.kv_lens.max()))
        self._inputs.write_decode(step, self._static, num_rows=size)
        prefixes = self._inputs.prefixes.of_decode(step) if self._inputs.prefixes is not None else None
        if prefixes is not None:
            self._share(prefixes, size)
        if step.adapters is not None:
            self._write_adapters(step.adapters, size)
        key = GraphKey(size, width, shares=prefixes is not None, has_adapters=step.adapters is not None)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(key)
        captured.graph.replay()
        return captured.hidden[:num_rows]

    def _write_adapters(self, ids: np.ndarray, size: int) -> None:
        num_moves = self._model.adapters.num_moves
        if num_moves != self._num_moves:
            self._captured = {key: graph for key, graph in self._captured.items() if not key.has_adapters}
            self._num_moves = num_moves
        padded = np.full(size, -1, dtype=np.int64)
        padded[: len(ids)] = ids
        self._inputs.accelerator.write(padded.view(np.uint8), self._adapters.view(torch.uint8))

    def _share(self, prefixes: Prefixes, size: int) -> None:
        written, for_size = self._written
        if written is not prefixes or for_size != size:
            self._inputs.accelerator.write(prefixes.padded(size).view(np.uint8), self._shared)
            self._written = (prefixes, size)

    def _width(self, longest: int) -> int:
        return min(max(LEAST_WIDTH, 1 << (longest - 1).bit_length()), self._inputs.slot_table.shape[1])

    def _capture(self, key: GraphKey) -> CapturedGraph:
        inputs, model, size = self._inputs, self._model, key.num_rows
        views = inputs.decode_views(self._static, num_rows=size)
        table = inputs.slot_table
        batch = ForwardBatch(
            **views,
            query_starts=self._starts[: size + 1],
            logits_rows=self._rows[:size],
            slot_table=table[:, : key.width],
            shared=shared_views(self._shared, num_rows=size) if key.shares else None,
        )

        ids = self._adapters[:size]

        def run() -> torch.Tensor:
            table.view(-1)[batch.row_ids.long() * table.shape[1] + batch.positions] = batch.out_slots.int()
            x = model.embed(inputs.known(batch.token_ids), batch.positions)
            adapted = batch.with_adapters(ids, len(model.adapters)) if key.has_adapters else batch
            return model.run_body(x, x.float(), adapted, self._kv)

        return CapturedGraph(*inputs.accelerator.capture(run))
