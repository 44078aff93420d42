"""Writes quantized checkpoints, and says what weights they hold by slow loops over single numbers.

Each ``write_...`` takes q [N, K] (whole numbers), zero points and scales [N, G], and returns the stored tensors of one
matrix. The loops follow the formats' published descriptions; the product's readers are compared with them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]
Stored = dict[str, torch.Tensor]


def random_numbers(
    rows: int, width: int, group: int, bits: int, *, symmetric: bool, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q, zero, scale): q of 0..2^bits - 1; weights of about 1 / sqrt(width)."""
    rng = np.random.default_rng(seed)
    most = 1 << bits
    q = rng.integers(0, most, (rows, width))
    zero = np.full((rows, width // group), most // 2)
    if not symmetric:
        zero = rng.integers(most // 4, 3 * most // 4, zero.shape)
    scale = (rng.uniform(0.5, 1.5, zero.shape) * 4 / most / width**0.5).astype(np.float16)
    return q, zero, scale


def weights_by_loop(q: np.ndarray, zero: np.ndarray, scale: np.ndarray, groups: list[int]) -> torch.Tensor:
    out = torch.zeros(q.shape)
    for n in range(q.shape[0]):
        for k in range(q.shape[1]):
            g = groups[k]
            out[n, k] = (int(q[n, k]) - int(zero[n, g])) * float(scale[n, g])
    return out


def neighbours(width: int, group: int) -> list[int]:
    return [k // group for k in range(width)]


def words(numbers: list[int], bits: int) -> list[int]:
    """Numbers packed into words of 32 bits, the first one lowest, as signed integers."""
    count = 32 // bits
    found = []
    for start in range(0, len(numbers), count):
        word = 0
        for i, number in enumerate(numbers[start : start + count]):
            word |= int(number) << (bits * i)
        found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return found


def matrix_of_words(rows: list[list[int]], bits: int) -> torch.Tensor:
    return torch.tensor([words(row, bits) for row in rows], dtype=torch.int32)


def gptq(
    q: np.ndarray, zero: np.ndarray, scale: np.ndarray, *, bits: int, groups: list[int] | None, v1: bool = True
) -> Stored:
    stored_zero = (zero - 1) % (1 << bits) if v1 else zero
    found = {
        "qweight": matrix_of_words(q.tolist(), bits).T.contiguous(),
        "qzeros": matrix_of_words(stored_zero.T.tolist(), bits),
        "scales": torch.from_numpy(scale.T.copy()),
    }
    if groups is not None:
        found["g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return found


def awq(q: np.ndarray, zero: np.ndarray, scale: np.ndarray) -> Stored:
    def interleaved(row: list[int]) -> list[int]:
        return [row[8 * (i // 8) + AWQ_PLACES[i % 8]] for i in range(len(row))]

    return {
        "qweight": matrix_of_words([interleaved(row) for row in q.T.tolist()], 4),
        "qzeros": matrix_of_words([interleaved(row) for row in zero.T.tolist()], 4),
        "scales": torch.from_numpy(scale.T.copy()),
    }


def pack_quantized(q: np.ndarray, zero: np.ndarray, scale: np.ndarray, *, bits: int, symmetric: bool) -> Stored:
    found = {
        "weight_packed": matrix_of_words(q.tolist(), bits),
        "weight_shape": torch.tensor(q.shape),
        "weight_scale": torch.from_numpy(scale),
    }
    if not symmetric:
        found["weight_zero_point"] = matrix_of_words(zero.T.tolist(), bits).T.contiguous()
    return found


def quantized_folder(folder: Path, config: dict[str, Any], matrices: dict[str, Stored]) -> Path:
    """Replaces matrices of a model's folder (by name, without ``.weight``) and says so in its config."""
    tensors = load_file(folder / "model.safetensors")
    for stem, stored in matrices.items():
        tensors.pop(f"{stem}.weight")
        tensors |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": config}))
    return folder
