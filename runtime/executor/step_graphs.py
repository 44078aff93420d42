"""Steps as CUDA graphs: one for each number of tokens and rows, rounded up, and each width of the slot table.

Where each row has one token with logits, the step is a decode step: rows alone are rounded up. Other steps of up to
``MOST_TOKENS`` tokens (the end of a prompt, drafts, forced tokens, beside rows that decode) have graphs too, since
without one the host takes longer to launch their kernels than the device takes to run them. Their padding tokens are
one row, whose keys go to the executor's spare slot; further padding rows are empty.

Steps whose rows share prefixes have graphs of their own, with one more kernel in each layer. Steps with adapters have
theirs too: each token's adapter is copied in, and the adapters' tables are read where they lie, so these graphs are
dropped once tables are made anew. A decode step's graph is captured when its size first occurs, another step's when
its size occurs again. A graph runs from the embedding to the last norm; the head runs after it, so all graphs share
their memory and none holds logits. Only a capture waits for the device.

The ranks of a split model capture a graph at the same step, as what chooses one is equal on all of them: a capture runs
the layers once more than a replay, and with them the sums that join the ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..layers.batch import ForwardBatch, StepArrays
from .accelerator import DeviceGraph
from .device_batch import DeviceBatch, graph_size_bytes, shared_views
from .prefixes import Prefixes, shared_size

if TYPE_CHECKING:
    from ..memory import KVPool
    from ..models import Model

LEAST_WIDTH = 512  # positions; wider tables are powers of two, so that the attention grid fits the contexts
TOKENS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # of steps with prompts
MOST_TOKENS = TOKENS[-1]
ROWS = (5, 17, 65, 257, 1025)  # of these steps; never as many as tokens, which would be a decode step
AHEAD = 64  # tokens of the largest step with prompts whose graph is captured before it occurs


def ladder(max_rows: int) -> tuple[int, ...]:
    """The numbers of rows that have graphs. Padding rows: at most 7 up to 64 rows, 15 up to 256, 31 beyond."""
    sizes = [*(1, 2, 4, 8), *range(16, 64, 8), *range(64, 256, 16), *range(256, 1024, 32)]
    last = min(max_rows, sizes[-1])
    return (*(size for size in sizes if size < last), last)


class GraphKey(NamedTuple):
    num_tokens: int
    num_rows: int  # as many as tokens: a decode step
    width: int  # of the slot table
    shares: bool  # prefixes
    has_adapters: bool


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    graph: DeviceGraph
    hidden: torch.Tensor  # [tokens, C]


class StepGraphs:
    """Owns the graphs of one model and pool, and the buffer of integers that all of them read."""

    def __init__(self, model: Model, kv: KVPool, inputs: DeviceBatch) -> None:
        self._model, self._kv, self._inputs = model, kv, inputs
        self.sizes = ladder(inputs.max_rows)
        device, most = inputs.accelerator.device, max(self.sizes[-1], MOST_TOKENS)
        size_bytes = max(graph_size_bytes(most, ROWS[-1]), graph_size_bytes(self.sizes[-1], self.sizes[-1]))
        self._static = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        self._tokens = torch.arange(most, dtype=torch.int64, device=device)
        self._shared = torch.zeros(4 * shared_size(most), dtype=torch.uint8, device=device)
        self._written: tuple[Prefixes | None, int] = (None, 0)  # the content of ``_shared``, and its number of tokens
        self._adapters = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._num_moves = 0  # of the adapters' tables, at which graphs with adapters were captured
        self._captured: dict[GraphKey, CapturedGraph] = {}
        self._met: set[GraphKey] = set()  # of steps with prompts that had no graph
        self._widest = min(LEAST_WIDTH, inputs.slot_table.shape[1])
        self.is_cold = False  # whether the last step took longer than later ones of its size will

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def forward(self, step: StepArrays) -> torch.Tensor | None:
        """The head's input [L, C]. None for a step that has no graph: of too many tokens or rows, or of a size that
        occurs for the first time with a prompt.
        """
        self.is_cold = False
        size = self._size_of(step)
        if size is None:
            return None
        width = self._width(int(step.kv_lens.max()))
        self._widest = max(self._widest, width)
        key, is_decode = GraphKey(*size, width, shares=False, has_adapters=step.adapters is not None), step.is_decode
        if not is_decode and key not in self._captured and key not in self._met:
            self._met.add(key)
            self.is_cold = True
            return None
        self._inputs.write_step(step, self._static, num_tokens=key.num_tokens, num_rows=key.num_rows)
        if (finder := self._inputs.prefixes) is not None:
            counts = np.diff(step.query_starts)
            prefixes = finder.of_decode(step) if is_decode else finder.of(step.row_ids, step.kv_lens, counts)
            if prefixes is not None:
                self._share(prefixes, key.num_tokens)
                key = key._replace(shares=True)
        if step.adapters is not None:
            self._write_adapters(step.adapters, key.num_tokens)
        hidden = self._replayed(key)
        if is_decode:
            return hidden[: len(step.row_ids)]
        if len(step.logits_rows) == step.num_tokens:
            return hidden[: step.num_tokens]
        views = self._inputs.graph_views(self._static, num_tokens=key.num_tokens, num_rows=key.num_rows)
        return hidden[views["logits_rows"][: len(step.logits_rows)]]

    def capture_ahead(self) -> bool:
        """Capture the graph of one more size before a step has it. False where none is missing."""
        key = next((key for key in self._usual() if key not in self._captured), None)
        if key is not None:
            self._inputs.write_nothing(self._static, num_tokens=key.num_tokens, num_rows=key.num_rows)
            self._captured[key] = self._capture(key)
        return key is not None

    def _usual(self) -> Iterator[GraphKey]:
        """The sizes of steps without adapters or shared prefixes that most servers have, small ones first."""
        for tokens in (size for size in TOKENS if size <= AHEAD):
            yield GraphKey(tokens, ROWS[0], self._widest, shares=False, has_adapters=False)
        for rows in self.sizes:
            yield GraphKey(rows, rows, self._widest, shares=False, has_adapters=False)

    def _size_of(self, step: StepArrays) -> tuple[int, int] | None:
        """Tokens and rows of its graph."""
        num_tokens, num_rows = step.num_tokens, len(step.row_ids)
        if step.is_decode:
            if num_rows > self.sizes[-1]:
                return None
            return (self.sizes[bisect_left(self.sizes, num_rows)],) * 2
        if not 0 < num_tokens <= MOST_TOKENS:
            return None
        tokens = TOKENS[bisect_left(TOKENS, num_tokens)]
        needed = num_rows + (tokens > num_tokens)
        return (tokens, ROWS[bisect_left(ROWS, needed)]) if needed <= ROWS[-1] else None

    def _replayed(self, key: GraphKey) -> torch.Tensor:
        captured = self._captured.get(key)
        if captured is None:
            self.is_cold = True
            captured = self._captured[key] = self._capture(key)
        captured.graph.replay()
        return captured.hidden

    def _write_adapters(self, ids: np.ndarray, num_tokens: int) -> None:
        num_moves = self._model.adapters.num_moves
        if num_moves != self._num_moves:
            self._captured = {key: graph for key, graph in self._captured.items() if not key.has_adapters}
            self._num_moves = num_moves
        padded = np.full(num_tokens, -1, dtype=np.int64)
        padded[: len(ids)] = ids
        self._inputs.accelerator.write(padded.view(np.uint8), self._adapters.view(torch.uint8))

    def _share(self, prefixes: Prefixes, num_tokens: int) -> None:
        written, for_size = self._written
        if written is not prefixes or for_size != num_tokens:
            self._inputs.accelerator.write(prefixes.padded(num_tokens).view(np.uint8), self._shared)
            self._written = (prefixes, num_tokens)

    def _width(self, longest: int) -> int:
        return min(max(LEAST_WIDTH, 1 << (longest - 1).bit_length()), self._inputs.slot_table.shape[1])

    def _capture(self, key: GraphKey) -> CapturedGraph:
        inputs, model, size = self._inputs, self._model, key.num_tokens
        views = inputs.graph_views(self._static, num_tokens=size, num_rows=key.num_rows)
        views["logits_rows"] = self._tokens[:size]
        places = views.pop("places")
        table = inputs.slot_table
        batch = ForwardBatch(
            **views,
            slot_table=table[:, : key.width],
            shared=shared_views(self._shared, num_tokens=size) if key.shares else None,
        )
        ids = self._adapters[:size]

        def run() -> torch.Tensor:
            table.view(-1)[places] = batch.out_slots.int()
            x = model.embed(inputs.known(batch.token_ids), batch.positions)
            adapted = batch.with_adapters(ids, len(model.adapters)) if key.has_adapters else batch
            return model.run_body(x, x.float(), adapted, self._kv)

        return CapturedGraph(*inputs.accelerator.capture(run))
