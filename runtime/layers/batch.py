"""One step's tokens as tensors: the one place where a plan's integers become them. Never holds weights or KV.

a row's tokens:   [0, kv_len - n) in the pool   [kv_len - n, kv_len) in this step: token_ids[starts[r]:starts[r+1]]
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of R rows. Row r's context lies in the slots ``slot_table[row_ids[r], :kv_lens[r]]``."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    out_slots: torch.Tensor  # int64 [T]: where each token's keys and values go
    row_ids: torch.Tensor  # int32 [R]
    query_starts: torch.Tensor  # int32 [R + 1]
    kv_lens: torch.Tensor  # int32 [R], this step's tokens included
    slot_table: torch.Tensor  # int32 [rows, positions]
    logits_rows: torch.Tensor  # int64 [L], indices into the T tokens

    @classmethod
    def from_plan(cls, plan: StepPlan, slot_table: np.ndarray, device: torch.device | str = "cpu") -> "ForwardBatch":
        """``slot_table`` (int32 [max_rows, max_len]) is the caller's and kept between steps: each row is brought up to
        date from its ``stale_from``. On the CPU the batch reads it in place; a GPU gets the rows of this step.
        """
        rows, device = plan.rows, torch.device(device)
        for row in rows:
            slot_table[row.row_id, row.stale_from : row.end] = row.slot_ids[row.stale_from : row.end]
        num_tokens = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(num_tokens, out=starts[1:])
        ends = np.array([row.end for row in rows], dtype=np.int32)
        row_ids = np.array([row.row_id for row in rows], dtype=np.int32)
        # Token t of row r: position = ends[r] - n_r + (t - starts[r]).
        positions = np.arange(starts[-1]) + np.repeat(ends - starts[1:], num_tokens)
        wanted = np.array([row.num_logits for row in rows], dtype=np.int64)
        logits_rows = np.arange(wanted.sum()) + np.repeat(starts[1:] - np.cumsum(wanted), wanted)
        wide = {
            "token_ids": _joined([row.token_ids for row in rows]),
            "positions": positions,
            "out_slots": _joined([row.slot_ids[row.start : row.end] for row in rows]),
            "logits_rows": logits_rows,
        }
        narrow = {"row_ids": row_ids, "query_starts": starts.astype(np.int32), "kv_lens": ends}
        if device.type == "cpu":
            return cls(**_moved(wide, device), **_moved(narrow, device), slot_table=torch.from_numpy(slot_table))
        narrow["row_ids"] = np.arange(len(rows), dtype=np.int32)
        narrow["slot_table"] = slot_table[row_ids, : int(ends.max(initial=0))]
        return cls(**_moved(wide, device), **_moved(narrow, device))

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_logits(self) -> int:
        return self.logits_rows.shape[0]


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, dtype=np.int64)


def _moved(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Arrays of one type as tensors on the device, by a single transfer that the host need not wait for."""
    whole = torch.from_numpy(np.concatenate([array.ravel() for array in arrays.values()]))
    if device.type == "cuda":
        whole = whole.pin_memory()
    parts = whole.to(device, non_blocking=True).split([array.size for array in arrays.values()])
    return {name: part.view(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}
