"""A step's integers on the device: one copy a step, and a slot table that stays there.

A token id below 0 stands for a token that the previous step is drawing: ``-1 - i`` for its draw i. The device looks it
up in ``drawn``, so the host can queue a step before it knows the tokens of the previous one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...kernels import SharedPrefixes
from ...kernels.shared import PIECE_FIELDS
from ..layers.batch import NARROW, WIDE, ForwardBatch, StepArrays
from ..scheduler import MAX_DRAFT_TOKENS
from .accelerator import Accelerator
from .prefixes import PIECES_A_ROW, PrefixFinder, shared_size

_STATIC_WIDE, _STATIC_NARROW = ("token_ids", "positions", "out_slots"), ("row_ids", "kv_lens")


class DeviceBatch:
    """Owns the slot table and the last step's draws.

    The table's rows: first the sequences', then one padding row, whose only slot is ``spare_slot``. No sequence
    uses that slot.
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
        self.slot_table[self._padding_row, 0] = spare_slot
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
        wide = {name: getattr(step, name) for name in WIDE} | {"places": places}
        narrow = {name: getattr(step, name) for name in NARROW} | {"slots": slots}
        prefixes = None
        if self.prefixes is not None:
            self.prefixes.note_step(step)
            prefixes = self.prefixes.of(step.row_ids, step.kv_lens, np.diff(step.query_starts))
        if prefixes is not None:
            narrow |= {"order": prefixes.order, "own_from": prefixes.own_from, "pieces": prefixes.pieces.reshape(-1)}
        found = _unpacked(self.accelerator.upload(_packed(wide, narrow)), wide, narrow)
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

    def write_decode(self, step: StepArrays, static: torch.Tensor, *, num_rows: int) -> None:
        """Write a step of one token a row into ``static``, as ``decode_views`` reads it, padded to ``num_rows`` rows.

        Slots of earlier positions are written to the table here; the reader of the views writes this step's own slots.
        """
        n = len(step.row_ids)
        packed = np.zeros(decode_size_bytes(num_rows), dtype=np.uint8)
        wide = packed[: 3 * 8 * num_rows].view(np.int64).reshape(3, num_rows)
        narrow = packed[3 * 8 * num_rows :].view(np.int32).reshape(2, num_rows)
        wide[0, :n] = step.token_ids
        wide[1, :n] = step.positions
        wide[2, :n] = step.out_slots
        wide[2, n:] = self.spare_slot
        narrow[0, :n] = step.row_ids
        narrow[0, n:] = self._padding_row
        narrow[1, :n] = step.kv_lens
        narrow[1, n:] = 1
        if self.prefixes is not None:
            self.prefixes.note_step(step)
        if step.earlier:
            upload, table = self.accelerator.upload, self.slot_table
            table.view(-1)[upload(step.earlier.places(table.shape[1]))] = upload(step.earlier.slots)
        self.accelerator.write(packed, static)

    def decode_views(self, static: torch.Tensor, *, num_rows: int) -> dict[str, Any]:
        """The arrays that ``write_decode`` writes, by name, as views of ``static``."""
        n = num_rows
        wide = static[: 3 * 8 * n].view(torch.int64).view(3, n)
        narrow = static[3 * 8 * n : decode_size_bytes(n)].view(torch.int32).view(2, n)
        return dict(zip(_STATIC_WIDE, wide.unbind(0), strict=True)) | dict(
            zip(_STATIC_NARROW, narrow.unbind(0), strict=True)
        )


def shared_views(static: torch.Tensor, *, num_rows: int) -> SharedPrefixes:
    """The arrays that ``Prefixes.padded`` lays out, as views of ``static`` (uint8)."""
    n = num_rows
    sizes = (n, n, n * PIECES_A_ROW * PIECE_FIELDS)
    order, own_from, pieces = static[: 4 * shared_size(n)].view(torch.int32).split(sizes)
    return SharedPrefixes(order, pieces.view(-1, PIECE_FIELDS), own_from)


def decode_size_bytes(num_rows: int) -> int:
    """Bytes of a decode step's integers."""
    return num_rows * (3 * 8 + 2 * 4)


def _packed(wide: dict[str, np.ndarray], narrow: dict[str, np.ndarray]) -> np.ndarray:
    """uint8: all of ``wide`` as int64, then all of ``narrow`` as int32."""
    parts = [(array, np.int64) for array in wide.values()] + [(array, np.int32) for array in narrow.values()]
    return np.concatenate([array.astype(dtype, copy=False).view(np.uint8) for array, dtype in parts])


def _unpacked(packed: torch.Tensor, wide: dict[str, np.ndarray], narrow: dict[str, np.ndarray]) -> dict[str, Any]:
    middle = 8 * sum(map(len, wide.values()))
    wides = packed[:middle].view(torch.int64).split([len(array) for array in wide.values()])
    narrows = packed[middle:].view(torch.int32).split([len(array) for array in narrow.values()])
    return dict(zip((*wide, *narrow), (*wides, *narrows), strict=True))
