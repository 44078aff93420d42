"""One step's tokens as tensors: the one place where a plan's integers become them. Never holds weights or KV.

a row's tokens:   [0, kv_len - n) in the pool   [kv_len - n, kv_len) in this step: token_ids[starts[r]:starts[r+1]]

A draft that is a tree is run as its branches: each is a row of its own, over the slots of the sequence and of the
branch's ancestors. So a token sees exactly what it would see in a chain, in the same order, to the last bit.

the text t, guessed  a b c  and  a d      rows   t a b c    and    t a | d      (t and a's keys are read, not computed)
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..scheduler.draft import branches_of
from ..scheduler.plan import PlanRow, StepPlan


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of R rows. Row r's context lies in the slots ``slot_table[row_ids[r], :kv_lens[r]]``.

    A row is a sequence, or a branch of what was guessed to follow it.
    """

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
        date from its ``stale_from``; branches take rows from its end. On the CPU the batch reads it in place; a GPU
        gets the rows of this step.
        """
        rows, device = plan.rows, torch.device(device)
        for row in rows:
            slot_table[row.row_id, row.stale_from : row.end] = row.slot_ids[row.stale_from : row.end]
        lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        wanted = np.array([row.num_logits for row in rows], dtype=np.int64)
        logits_rows = np.arange(wanted.sum()) + np.repeat(np.cumsum(lengths) - np.cumsum(wanted), wanted)
        if any(row.draft_parents is not None for row in rows):
            row_ids, ends, num_tokens, contexts = branched(rows, len(slot_table))
            for table_row, slots in contexts:
                slot_table[table_row, : len(slots)] = slots
        else:
            ends, num_tokens = np.array([row.end for row in rows], dtype=np.int32), lengths
            row_ids = np.array([row.row_id for row in rows], dtype=np.int32)
        starts = np.zeros(len(row_ids) + 1, dtype=np.int64)
        np.cumsum(num_tokens, out=starts[1:])
        # Token t of row r: position = ends[r] - n_r + (t - starts[r]).
        positions = np.arange(starts[-1]) + np.repeat(ends - starts[1:], num_tokens)
        wide = {
            "token_ids": _joined([row.token_ids for row in rows]),
            "positions": positions,
            "out_slots": _joined([row.slot_ids[row.start : row.end] for row in rows]),
            "logits_rows": logits_rows,
        }
        narrow = {"row_ids": row_ids, "query_starts": starts.astype(np.int32), "kv_lens": ends}
        if device.type == "cpu":
            return cls(**_moved(wide, device), **_moved(narrow, device), slot_table=torch.from_numpy(slot_table))
        narrow["row_ids"] = np.arange(len(row_ids), dtype=np.int32)
        narrow["slot_table"] = slot_table[row_ids, : int(ends.max(initial=0))]
        return cls(**_moved(wide, device), **_moved(narrow, device))

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_logits(self) -> int:
        return self.logits_rows.shape[0]


def branched(
    rows: tuple[PlanRow, ...], table_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[int, np.ndarray]]]:
    """Row ids, ends (int32) and numbers of tokens (int64) where some drafts are trees, and branches' rows of a table.

    The table has ``table_len`` rows; branches take them from its end, each with the slots of all its positions.
    """
    found: list[tuple[int, int, int]] = []
    contexts: list[tuple[int, np.ndarray]] = []
    spare = table_len
    for row in rows:
        if row.draft_parents is None:
            found.append((row.row_id, row.end, len(row.token_ids)))
            continue
        at = row.tokens_end
        for begin, end, before in branches_of(row.draft_parents):
            if begin == 0:  # the first goes on from the sequence's own tokens
                found.append((row.row_id, at + end, at - row.start + end))
                continue
            spare -= 1
            path = np.array([*before, *range(begin, end)], dtype=np.int64)
            contexts.append((spare, np.concatenate((row.slot_ids[:at], row.slot_ids[at + path]))))
            found.append((spare, at + len(path), end - begin))
    assert spare > max(row.row_id for row in rows), "more branches than the table has spare rows"
    row_ids, ends, num_tokens = zip(*found, strict=True)
    return np.array(row_ids, np.int32), np.array(ends, np.int32), np.array(num_tokens, np.int64), contexts


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, dtype=np.int64)


def _moved(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Arrays of one type as tensors on the device, by a single transfer that the host need not wait for."""
    whole = torch.from_numpy(np.concatenate([array.ravel() for array in arrays.values()]))
    if device.type == "cuda":
        whole = whole.pin_memory()
    parts = whole.to(device, non_blocking=True).split([array.size for array in arrays.values()])
    return {name: part.view(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}
