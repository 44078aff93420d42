"""A step's integers on the device: one copy a step, and a slot table that stays there.

Each array of a copy begins at a multiple of 16 bytes: Triton builds a kernel anew for arrays that do not, which takes
a second, and their places would change from step to step.

A token id below 0 stands for a token that the previous step is drawing: ``-1 - i`` for its draw i. The device looks it
up in ``drawn``, so the host can queue a step before it knows the tokens of the previous one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch

from ...kernels import SharedPrefixes
from ...kernels.shared import PIECE_FIELDS
from ..layers.batch import NARROW, WIDE, ForwardBatch, StepArrays
from ..scheduler import MAX_DRAFT_TOKENS
from .accelerator import Accelerator
from .prefixes import PIECES_A_ROW, PrefixFinder, aligned, shared_size

ALIGNMENT = 16  # bytes


class DeviceBatch:
    """Owns the slot table and the last step's draws.

    The table's rows: first the sequences', then one padding row, whose slots are all ``spare_slot``. No sequence uses
    that slot.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        max_rows: int,
        max_len: int,
        spare_slot: int,
        prefixes: PrefixFinder | None = None,
    ) -> None:
        """``prefixes`` finds shared prefixes in this table's rows; None: each row reads its whole context itself."""
        device = accelerator.device
        self.accelerator = accelerator
        self.max_rows = max_rows
        self.prefixes = prefixes
        self.spare_slot = spare_slot
        self._padding_row = max_rows
        self.slot_table = torch.zeros((self._padding_row + 1, max_len), dtype=torch.int32, device=device)
        self.slot_table[self._padding_row] = spare_slot
        self.drawn = torch.zeros(max_rows + MAX_DRAFT_TOKENS, dtype=torch.int64, device=device)

    @property
    def num_fed(self) -> int:
        """The next plan may use draws below this number."""
        return len(self.drawn)

    def take_draws(self, token_ids: torch.Tensor) -> None:
        """Keep the step's draws, int64 [R], for the next plan's negative ids. -1 (no token allowed) becomes 0."""
        count = min(len(token_ids), self.num_fed)
        torch.clamp_min(token_ids[:count], 0, out=self.drawn[:count])

    def forward_batch(self, step: StepArrays) -> ForwardBatch:
        """The batch of any step, in newly allocated tensors."""
        table = self.slot_table
        own_places = step.token_rows.astype(np.int64) * table.shape[1] + step.positions
        places = np.concatenate((step.earlier.places(table.shape[1]), own_places))
        slots = np.concatenate((step.earlier.slots, step.out_slots))
        arrays = {name: getattr(step, name) for name in (*WIDE, *NARROW)} | {"places": places, "slots": slots}
        prefixes = None
        if self.prefixes is not None:
            self.prefixes.note_step(step)
            prefixes = self.prefixes.of(step.row_ids, step.kv_lens, np.diff(step.query_starts))
        if prefixes is not None:
            arrays |= {"order": prefixes.order, "own_from": prefixes.own_from, "pieces": prefixes.pieces.reshape(-1)}
        layout = StepLayout.of({name: len(array) for name, array in arrays.items()})
        packed = np.zeros(layout.size_bytes, np.uint8)
        for name, into in layout.arrays(packed).items():
            into[:] = arrays[name]
        found: dict[str, Any] = layout.tensors(self.accelerator.upload(packed))
        table.view(-1)[found.pop("places")] = found.pop("slots")
        token_ids = self.known(found.pop("token_ids"))
        shared = None
        if prefixes is not None:
            pieces = found.pop("pieces").view(-1, PIECE_FIELDS)
            shared = SharedPrefixes(found.pop("order"), pieces, found.pop("own_from"))
        slot_table = table[:, : int(step.kv_lens.max())]
        return ForwardBatch(token_ids=token_ids, slot_table=slot_table, shared=shared, **found)

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` with the previous step's draws in place of negative ids."""
        return torch.where(token_ids < 0, self.drawn[(-1 - token_ids).clamp_min(0)], token_ids)

    def write_step(self, step: StepArrays, static: torch.Tensor, *, num_tokens: int, num_rows: int) -> None:
        """Write ``step`` into ``static``, as ``graph_views`` reads it, padded to ``num_tokens`` tokens and ``num_rows``
        rows: with one token each where there are as many rows as tokens, else the first of them has all padding tokens.

        Slots of earlier positions are written to the table here; the reader of the views writes this step's own slots.
        """
        n, r = step.num_tokens, len(step.row_ids)
        packed, arrays = self._padding(num_tokens, num_rows)
        arrays["token_ids"][:n] = step.token_ids
        arrays["positions"][:n] = step.positions
        arrays["out_slots"][:n] = step.out_slots
        arrays["places"][:n] = step.token_rows.astype(np.int64) * self.slot_table.shape[1] + step.positions
        arrays["logits_rows"][: len(step.logits_rows)] = step.logits_rows
        arrays["row_ids"][:r] = step.row_ids
        arrays["kv_lens"][:r] = step.kv_lens
        if num_rows != num_tokens:
            arrays["query_starts"][: r + 1] = step.query_starts
            if n < num_tokens:  # each padding token sees a key, so that none divides by a weight of zero
                arrays["kv_lens"][r] = min(num_tokens - n, self.slot_table.shape[1])
        if self.prefixes is not None:
            self.prefixes.note_step(step)
        if step.earlier:
            upload, table = self.accelerator.upload, self.slot_table
            table.view(-1)[upload(step.earlier.places(table.shape[1]))] = upload(step.earlier.slots)
        self.accelerator.write(packed, static)

    def write_nothing(self, static: torch.Tensor, *, num_tokens: int, num_rows: int) -> None:
        """Write a step of padding alone into ``static``."""
        self.accelerator.write(self._padding(num_tokens, num_rows)[0], static)

    def _padding(self, num_tokens: int, num_rows: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        layout = _layout_of_graph(num_tokens, num_rows)
        packed = np.zeros(layout.size_bytes, dtype=np.uint8)
        arrays = layout.arrays(packed)
        arrays["out_slots"][:] = self.spare_slot
        arrays["places"][:] = self._padding_row * self.slot_table.shape[1]
        arrays["row_ids"][:] = self._padding_row
        is_decode = num_rows == num_tokens
        arrays["kv_lens"][:] = 1 if is_decode else min(num_tokens, self.slot_table.shape[1])
        arrays["query_starts"][1:] = np.arange(1, num_rows + 1) if is_decode else num_tokens
        return packed, arrays

    def graph_views(self, static: torch.Tensor, *, num_tokens: int, num_rows: int) -> dict[str, Any]:
        """The arrays that ``write_step`` writes, by name, as views of ``static``; ``places`` are of the step's slots in
        the slot table.
        """
        return _layout_of_graph(num_tokens, num_rows).tensors(static)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where arrays lie in one block of bytes: by name, first byte and number of elements. Those of ``LONG`` are int64,
    the others int32.
    """

    LONG: ClassVar[frozenset[str]] = frozenset((*WIDE, "places"))
    parts: dict[str, tuple[int, int]]
    size_bytes: int

    @classmethod
    def of(cls, lengths: dict[str, int]) -> StepLayout:
        parts, at = {}, 0
        for name, length in lengths.items():
            parts[name] = (at, length)
            at += -(-length * (8 if name in cls.LONG else 4) // ALIGNMENT) * ALIGNMENT
        return cls(parts, at)

    def arrays(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Views of ``packed``, uint8."""
        return {
            name: packed[at : at + length * kind.itemsize].view(kind)
            for name, (at, length) in self.parts.items()
            for kind in (np.dtype(np.int64 if name in self.LONG else np.int32),)
        }

    def tensors(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of ``packed``, uint8."""
        return {
            name: packed[at : at + length * kind.itemsize].view(kind)
            for name, (at, length) in self.parts.items()
            for kind in (torch.int64 if name in self.LONG else torch.int32,)
        }


@cache
def _layout_of_graph(num_tokens: int, num_rows: int) -> StepLayout:
    tokens = dict.fromkeys((*WIDE, "places"), num_tokens)
    return StepLayout.of(tokens | {"row_ids": num_rows, "query_starts": num_rows + 1, "kv_lens": num_rows})


def graph_size_bytes(num_tokens: int, num_rows: int) -> int:
    """Bytes of the integers of a step with a graph."""
    return _layout_of_graph(num_tokens, num_rows).size_bytes


def shared_views(static: torch.Tensor, *, num_tokens: int) -> SharedPrefixes:
    """The arrays that ``Prefixes.padded`` lays out, as views of ``static`` (uint8)."""
    n = aligned(num_tokens)
    sizes = (n, n, n * PIECES_A_ROW * PIECE_FIELDS)
    order, own_from, pieces = static[: 4 * shared_size(num_tokens)].view(torch.int32).split(sizes)
    return SharedPrefixes(order[:num_tokens], pieces.view(-1, PIECE_FIELDS), own_from[:num_tokens])
