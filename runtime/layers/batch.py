"""One step's tokens as tensors, made from the integers of a step plan.

a row's tokens:   [0, kv_len - n) in the pool   [kv_len - n, kv_len) in this step: token_ids[starts[r]:starts[r+1]]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ...kernels import SharedPrefixes
from ..scheduler.plan import DecodePart, PlanRow, StepPlan
from .adapters import AdapterRows
from .spread import Spread, Upload


@dataclass(frozen=True, slots=True)
class GivenInputs:
    """The first layer's inputs of tokens that no embedding has, such as those of an image."""

    at: torch.Tensor  # int64 [G], indices into the T tokens
    rows: torch.Tensor  # [G, C]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of R sequences. Row r's context lies in the slots ``slot_table[row_ids[r], :kv_lens[r]]``.

    With a ``spread``, rows, slots and lengths are of the keys that this rank owns, in the order of positions, and the
    queries of the whole step; the T tokens are those that this rank runs.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    out_slots: torch.Tensor  # int64 [T]: where each token's keys and values go
    row_ids: torch.Tensor  # int32 [R]
    query_starts: torch.Tensor  # int32 [R + 1]
    kv_lens: torch.Tensor  # int32 [R], this step's tokens included
    slot_table: torch.Tensor  # int32 [rows, positions]
    logits_rows: torch.Tensor  # int64 [L], indices into the T tokens
    shared: SharedPrefixes | None = None  # the shared prefixes, where reading them once pays
    adapters: AdapterRows | None = None  # None: no token has an adapter
    logits_adapters: AdapterRows | None = None  # of ``logits_rows``
    spread: Spread | None = None
    given: GivenInputs | None = None  # in place of the embeddings of these tokens, whose ids are of any token

    @classmethod
    def from_plan(cls, plan: StepPlan, slot_table: np.ndarray, device: torch.device | str = "cpu") -> "ForwardBatch":
        """``slot_table`` (int32 [max_rows, max_len]) belongs to the caller, who keeps it between steps. Each row is
        updated from its ``stale_from`` on. On a CPU the batch reads the table in place; on a GPU it gets a copy of this
        step's rows.
        """
        return cls.from_arrays(StepArrays.of(plan), slot_table, device)

    @classmethod
    def from_arrays(
        cls, step: "StepArrays", slot_table: np.ndarray, device: torch.device | str = "cpu"
    ) -> "ForwardBatch":
        """As ``from_plan``."""
        device = torch.device(device)
        step.put_slots(slot_table)
        wide = {name: getattr(step, name).astype(np.int64, copy=False) for name in WIDE}
        narrow = {name: getattr(step, name).astype(np.int32, copy=False) for name in NARROW}
        if device.type == "cpu":
            return cls(**_moved(wide, device), **_moved(narrow, device), slot_table=torch.from_numpy(slot_table))
        narrow["slot_table"] = slot_table[step.row_ids, : int(step.kv_lens.max(initial=0))]
        narrow["row_ids"] = np.arange(len(step.row_ids), dtype=np.int32)
        return cls(**_moved(wide, device), **_moved(narrow, device))

    def with_adapters(self, ids: torch.Tensor, num_adapters: int) -> "ForwardBatch":
        """``ids`` int [T]: each token's adapter, -1 for none."""
        rows = AdapterRows.of(ids, num_adapters)
        has_all = self.num_logits == self.num_tokens
        of_logits = rows if has_all else AdapterRows.of(ids[self.logits_rows], num_adapters)
        return replace(self, adapters=rows, logits_adapters=of_logits)

    def uploaded(self, upload: Upload) -> "ForwardBatch":
        """This batch of host memory on a device, with the slot table of its rows alone."""
        width = max(1, int(self.kv_lens.max()))
        return replace(
            self,
            token_ids=upload(self.token_ids.numpy()),
            positions=upload(self.positions.numpy()),
            out_slots=upload(self.out_slots.numpy()),
            logits_rows=upload(self.logits_rows.numpy()),
            query_starts=upload(self.query_starts.numpy()),
            kv_lens=upload(self.kv_lens.numpy()),
            row_ids=upload(np.arange(len(self.row_ids), dtype=np.int32)),
            slot_table=upload(self.slot_table[self.row_ids.long(), :width].numpy()),
            spread=None if self.spread is None else self.spread.uploaded(upload),
        )

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_logits(self) -> int:
        return self.logits_rows.shape[0]

    @property
    def num_logits_of_step(self) -> int:
        """Of all ranks that run some of the step's tokens."""
        return self.num_logits if self.spread is None else self.spread.num_logits


WIDE = ("token_ids", "positions", "out_slots", "logits_rows")
NARROW = ("row_ids", "query_starts", "kv_lens")


@dataclass(frozen=True, slots=True)
class SlotRuns:
    """Slots of neighbouring positions: run i has ``lengths[i]`` of them, of row ``rows[i]`` from position ``starts[i]``
    on; ``slots`` are those of all runs. Iterating gives (row, first position, slots).
    """

    rows: np.ndarray  # int32 [E], as the next two
    starts: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray

    @classmethod
    def missing(cls, rows: Sequence[PlanRow]) -> "SlotRuns":
        """The slots before each row's start that the executor does not hold."""
        late = [row for row in rows if row.stale_from < row.start]
        if not late:
            return NO_RUNS
        starts = np.array([row.stale_from for row in late], np.int32)
        ends = np.array([row.start for row in late], np.int32)
        slots = np.concatenate([row.slot_ids[row.stale_from : row.start] for row in late])
        return cls(np.array([row.row_id for row in late], np.int32), starts, ends - starts, slots)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[int, int, np.ndarray]]:
        at = 0
        for row, start, length in zip(self.rows.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield row, start, self.slots[at : at + length]
            at += length

    @property
    def firsts(self) -> np.ndarray:
        """[E]: of each run, its first slot's index in ``slots``."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def places(self, width: int) -> np.ndarray:
        """int64: of each slot its place in a table with rows of ``width``."""
        offsets = self.rows.astype(np.int64) * width + self.starts - self.firsts
        return np.repeat(offsets, self.lengths) + np.arange(len(self.slots))


_NONE = np.zeros(0, np.int32)
NO_RUNS = SlotRuns(_NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The integers of a ``ForwardBatch``, of any integer type.

    ``earlier``: slots of positions before the step's own that the slot table lacks.
    A token id of ``-1 - i`` stands for draw i of the step before, as in a plan. ``adapters``: each token's adapter, -1
    for none; None where no token has one.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    out_slots: np.ndarray
    logits_rows: np.ndarray
    row_ids: np.ndarray
    query_starts: np.ndarray
    kv_lens: np.ndarray
    earlier: SlotRuns
    adapters: np.ndarray | None = None

    @classmethod
    def of(cls, plan: StepPlan) -> "StepArrays":
        rows = plan.rows
        earlier = SlotRuns.missing(rows)
        part = plan.decodes()
        if part is not None:
            steps = np.arange(len(part) + 1)
            ends = part.starts + 1
            return cls(part.token_ids, part.starts, part.slot_ids, steps[:-1], part.row_ids, steps, ends, earlier)
        lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        wanted = np.array([row.num_logits for row in rows], dtype=np.int64)
        logits_rows = np.arange(wanted.sum()) + np.repeat(np.cumsum(lengths) - np.cumsum(wanted), wanted)
        row_ids = np.array([row.row_id for row in rows], dtype=np.int32)
        ends = np.array([row.end for row in rows], dtype=np.int32)
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        # Token t of row r: position = ends[r] - n_r + (t - starts[r]).
        positions = np.arange(starts[-1]) + np.repeat(ends - starts[1:], lengths)
        token_ids = _joined([row.token_ids for row in rows])
        out_slots = _joined([row.slot_ids[row.start : row.end] for row in rows])
        found = cls(token_ids, positions, out_slots, logits_rows, row_ids, starts, ends, earlier)
        return found if plan.vectorised is None else found._after(plan.vectorised)

    def _after(self, first: DecodePart) -> "StepArrays":
        """These arrays, with the rows of ``first`` before them."""
        n = len(first)
        steps = np.arange(n)
        return StepArrays(
            np.concatenate((first.token_ids, self.token_ids)),
            np.concatenate((first.starts, self.positions)),
            np.concatenate((first.slot_ids, self.out_slots)),
            np.concatenate((steps, self.logits_rows + n)),
            np.concatenate((first.row_ids, self.row_ids)),
            np.concatenate((steps, self.query_starts + n)),
            np.concatenate((first.starts + 1, self.kv_lens)),
            self.earlier,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether each row has one token, whose logits are wanted."""
        return len(self.row_ids) == len(self.token_ids) == len(self.logits_rows)

    @property
    def num_fed(self) -> int:
        """The tokens refer to draws of the step before below this number."""
        return max(0, -int(self.token_ids.min(initial=0)))

    @property
    def token_rows(self) -> np.ndarray:
        """[T]: of each token its row of the slot table."""
        if len(self.row_ids) == len(self.token_ids):
            return self.row_ids
        return np.repeat(self.row_ids, np.diff(self.query_starts))

    def put_slots(self, slot_table: np.ndarray) -> None:
        """Write the step's slots, and those ``earlier``, to the table (int32 [rows, positions])."""
        for row_id, start, slots in self.earlier:
            slot_table[row_id, start : start + len(slots)] = slots
        slot_table[self.token_rows, self.positions] = self.out_slots

    def cut(self, count: int) -> "list[StepArrays]":
        """At most ``count`` steps of equal numbers of tokens, which together have these tokens and logits in order. A
        sequence may lie in several of them.
        """
        ends = sorted({self.num_tokens * i // count for i in range(count + 1)})
        return [self._span(first, end) for first, end in pairwise(ends)]

    def _span(self, first: int, end: int) -> "StepArrays":
        """Tokens [first, end) of the step."""
        tokens = slice(first, end)
        after_first, after_last = np.searchsorted(self.query_starts, (first, end - 1), side="right").tolist()
        rows = slice(after_first - 1, after_last)
        bounds = self.query_starts[rows.start : rows.stop + 1].clip(first, end)
        return StepArrays(
            self.token_ids[tokens],
            self.positions[tokens],
            self.out_slots[tokens],
            self.logits_rows[slice(*np.searchsorted(self.logits_rows, (first, end)))] - first,
            self.row_ids[rows],
            bounds - first,
            self.positions[bounds[1:] - 1] + 1,
            self.earlier if first == 0 else NO_RUNS,
            None if self.adapters is None else self.adapters[tokens],
        )


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)


def _moved(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Any]:
    """Arrays of one type as tensors on the device, in a single transfer that the host does not wait for."""
    whole = torch.from_numpy(np.concatenate([array.ravel() for array in arrays.values()]))
    if device.type == "cuda":
        whole = whole.pin_memory()
    parts = whole.to(device, non_blocking=True).split([array.size for array in arrays.values()])
    return {name: part.view(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}
