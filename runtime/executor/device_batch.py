"""A plan's integers on the device: one copy a step, a slot table that stays there, and tokens that no host has seen.

A token id below 0 stands for a token that the step before is drawing: ``-1 - i`` for its draw i. The device looks it up
in ``drawn``, so that a step can be given before the host knows the tokens of the one before it. Never runs a model.
"""

from __future__ import annotations

import numpy as np
import torch

from ..layers.batch import ForwardBatch, branched
from ..scheduler import MAX_DRAFT_TOKENS, StepPlan
from .accelerator import Accelerator

_WIDE, _NARROW = ("token_ids", "positions", "out_slots"), ("row_ids", "kv_lens")


class DeviceBatch:
    """Owns the slot table and the last step's draws. After the rows of sequences the table has those of branches, and
    then the padding's, whose only slot is ``spare_slot``, which belongs to no sequence.
    """

    def __init__(self, accelerator: Accelerator, *, max_rows: int, max_len: int, spare_slot: int) -> None:
        device = accelerator.device
        self.accelerator = accelerator
        self.max_rows = max_rows
        self.spare_slot = spare_slot
        self._padding_row = max_rows + MAX_DRAFT_TOKENS
        self.slot_table = torch.zeros((self._padding_row + 1, max_len), dtype=torch.int32, device=device)
        self.slot_table[self._padding_row, 0] = spare_slot
        self.drawn = torch.zeros(max_rows + MAX_DRAFT_TOKENS, dtype=torch.int64, device=device)

    @property
    def num_fed(self) -> int:
        """The next plan may name draws below this."""
        return len(self.drawn)

    def take_draws(self, token_ids: torch.Tensor) -> None:
        """The step's draws, int64 [R]: what the next plan's negative ids mean. None was allowed: -1, taken as 0."""
        count = min(len(token_ids), self.num_fed)
        torch.clamp_min(token_ids[:count], 0, out=self.drawn[:count])

    def forward_batch(self, plan: StepPlan) -> ForwardBatch:
        """Of any plan, at addresses of its own."""
        rows, table = plan.rows, self.slot_table
        lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        wanted = np.array([row.num_logits for row in rows], dtype=np.int64)
        written = [(row.row_id, row.stale_from, row.slot_ids[row.stale_from : row.end]) for row in rows]
        if any(row.draft_parents is not None for row in rows):
            row_ids, ends, counts, contexts = branched(rows, self.max_rows + MAX_DRAFT_TOKENS)
            written += [(table_row, 0, slots) for table_row, slots in contexts]
        else:
            row_ids, ends, counts = np.array([row.row_id for row in rows]), np.array([row.end for row in rows]), lengths
        starts = np.zeros(len(row_ids) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        # Token t of row r: position = ends[r] - n_r + (t - starts[r]).
        parts = {
            "token_ids": np.concatenate([row.token_ids for row in rows]),
            "positions": np.arange(starts[-1]) + np.repeat(ends - starts[1:], counts),
            "out_slots": np.concatenate([row.slot_ids[row.start : row.end] for row in rows]),
            "logits_rows": np.arange(wanted.sum()) + np.repeat(np.cumsum(lengths) - np.cumsum(wanted), wanted),
            "places": self._places(written),
            "slots": np.concatenate([slots for _, _, slots in written]),
            "row_ids": row_ids,
            "query_starts": starts,
            "kv_lens": ends,
        }
        wide = {name: parts[name] for name in (*_WIDE, "logits_rows", "places")}
        narrow = {name: parts[name] for name in ("slots", "query_starts", *_NARROW)}
        found = _unpacked(self.accelerator.upload(_packed(wide, narrow)), wide, narrow)
        table.view(-1)[found.pop("places")] = found.pop("slots")
        token_ids = self.known(found.pop("token_ids"))
        return ForwardBatch(token_ids=token_ids, slot_table=table[:, : int(ends.max())], **found)

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The ids with the step before's draws in their places."""
        return torch.where(token_ids < 0, self.drawn[(-1 - token_ids).clamp_min(0)], token_ids)

    def write_decode(self, plan: StepPlan, static: torch.Tensor, *, num_rows: int) -> None:
        """A plan of one token a row into ``static``, as ``decode_views`` reads it; rows up to ``num_rows`` are padding.

        Slots of positions before this step's that have changed go to the table at once; this step's own are left to
        whoever reads the views.
        """
        rows, padding = plan.rows, num_rows - len(plan.rows)
        wide = np.zeros((3, num_rows), dtype=np.int64)
        narrow = np.ones((2, num_rows), dtype=np.int32)
        wide[0, : len(rows)] = [row.token_ids.item(0) for row in rows]
        wide[1, : len(rows)] = starts = [row.start for row in rows]
        wide[2, : len(rows)] = [row.slot_ids.item(row.start) for row in rows]
        narrow[0, : len(rows)] = [row.row_id for row in rows]
        narrow[1, : len(rows)] = np.add(starts, 1)
        if padding:
            wide[2, -padding:] = self.spare_slot
            narrow[0, -padding:] = self._padding_row
        stale = [row for row in rows if row.stale_from < row.start]
        if stale:
            written = [(row.row_id, row.stale_from, row.slot_ids[row.stale_from : row.start]) for row in stale]
            upload = self.accelerator.upload
            slots = np.concatenate([slots for _, _, slots in written])
            self.slot_table.view(-1)[upload(self._places(written))] = upload(slots)
        packed = np.concatenate([part.reshape(-1).view(np.uint8) for part in (wide, narrow)])
        self.accelerator.write(packed, static)

    def decode_views(self, static: torch.Tensor, *, num_rows: int) -> dict[str, torch.Tensor]:
        """What ``write_decode`` writes, by name, each at an address that stays."""
        n = num_rows
        wide = static[: 3 * 8 * n].view(torch.int64).view(3, n)
        narrow = static[3 * 8 * n : decode_size_bytes(n)].view(torch.int32).view(2, n)
        return dict(zip(_WIDE, wide.unbind(0), strict=True)) | dict(zip(_NARROW, narrow.unbind(0), strict=True))

    def _places(self, written: list[tuple[int, int, np.ndarray]]) -> np.ndarray:
        """Where in the flat table each span of slots goes, given its row and first position."""
        width = self.slot_table.shape[1]
        lengths = np.array([len(slots) for _, _, slots in written], dtype=np.int64)
        firsts = np.array([row * width + start for row, start, _ in written], dtype=np.int64)
        return np.arange(lengths.sum()) + np.repeat(firsts - np.cumsum(lengths) + lengths, lengths)


def decode_size_bytes(num_rows: int) -> int:
    """Of a decode step's integers."""
    return num_rows * (3 * 8 + 2 * 4)


def _packed(wide: dict[str, np.ndarray], narrow: dict[str, np.ndarray]) -> np.ndarray:
    """uint8: all of ``wide`` as int64, then all of ``narrow`` as int32."""
    parts = [(array, np.int64) for array in wide.values()] + [(array, np.int32) for array in narrow.values()]
    return np.concatenate([array.astype(dtype, copy=False).view(np.uint8) for array, dtype in parts])


def _unpacked(
    packed: torch.Tensor, wide: dict[str, np.ndarray], narrow: dict[str, np.ndarray]
) -> dict[str, torch.Tensor]:
    middle = 8 * sum(map(len, wide.values()))
    wides = packed[:middle].view(torch.int64).split([len(array) for array in wide.values()])
    narrows = packed[middle:].view(torch.int32).split([len(array) for array in narrow.values()])
    return dict(zip((*wide, *narrow), (*wides, *narrows), strict=True))
