"""The definition of every op, in plain torch on any device. Tests compare the fast kernels with these.

Shapes: T tokens, R rows of the batch, S slots of the KV pool, Hq/Hkv query and KV heads, D head size, V vocabulary,
W = ceil(V / 32) mask words. Arithmetic is float32 (float64 where a probability is summed); results take the dtype of
the first argument.
"""

import numpy as np
import torch
from torch import Tensor

from .batch import LogitEdits, SampleBatch, Sampled
from .groups import Groups
from .quantized_kv import dequantize_kv, quantize_kv
from .quantized_weight import Experts, QuantizedWeight, dequantize, unpacked_experts
from .shared import SharedPrefixes, Sharing

LOG2_E = 1.4426950408889634


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if residual is None:
        total, residual_out = x.float(), x
    else:
        total = x.float() + residual.float()
        residual_out = total.to(residual.dtype)
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return (total * scale * weight.float()).to(x.dtype), residual_out


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_slots: Tensor,
) -> None:
    q.copy_(_rotate(q, cos_sin, positions))
    _store(k_cache, out_slots, _rotate(k, cos_sin, positions))
    if v is not None:
        _store(v_cache, out_slots, v)


def norm_rope_write_kv(q: Tensor, k: Tensor, *inputs: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    q, k = rms_norm(q, q_norm, eps)[0], rms_norm(k, k_norm, eps)[0]
    rope_write_kv(q, k, *inputs)
    return q


def _store(cache: Tensor, slots: Tensor, x: Tensor) -> None:
    if cache.dtype == torch.float8_e4m3fn:  # bytes, since torch cannot index 8-bit floats on every device
        x = x.float().clamp(-448, 448).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    cache[slots] = quantize_kv(x) if cache.dtype == torch.int8 else x.to(cache.dtype)


def _at(cache: Tensor, slots: Tensor, head_dim: int) -> Tensor:
    if cache.dtype == torch.int8:
        return dequantize_kv(cache[slots], head_dim)
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8)[slots].view(cache.dtype).float()
    return cache[slots].float()


def _rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    # cos_sin row: [cos of each pair | sin of each pair]; pair i is (x[i], x[i + half]); the rest is not rotated.
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)  # [T, 1, half]
    half = cos.shape[-1]
    first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def gelu_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_table: Tensor,
    row_ids: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    lens = query_starts.diff().long()
    after = (query_starts[1:].long()).repeat_interleave(lens) - torch.arange(len(q), device=q.device)
    ends = kv_lens.long().repeat_interleave(lens) - after + 1  # the row's queries are the last positions of its context
    firsts = (ends - sliding_window).clamp_min(0) if sliding_window else None
    rows = (slot_table, row_ids, query_starts, ends)
    out, _ = partial_attention(q, k_cache, v_cache, *rows, scale=scale, firsts=firsts, soft_cap=soft_cap)
    return out.to(q.dtype)


def partial_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_table: Tensor,
    row_ids: Tensor,
    query_starts: Tensor,
    ends: Tensor,
    *,
    scale: float,
    firsts: Tensor | None = None,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)  # [T, Hq, D]
    logs = torch.full(q.shape[:2], float("-inf"), device=q.device)
    group = q.shape[1] // k_cache.shape[1]
    for row_id, begin, end in zip(row_ids.tolist(), query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True):
        count = int(ends[begin:end].max()) if begin < end else 0
        if not count:
            continue
        slots = slot_table[row_id, :count].long()
        keys = _at(k_cache, slots, q.shape[2]).repeat_interleave(group, dim=1)  # [len, Hq, D]
        values = _at(v_cache, slots, q.shape[2]).repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,lhd->htl", q[begin:end].float(), keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        key_at = torch.arange(count, device=q.device).unsqueeze(0)
        hidden = key_at >= ends[begin:end].unsqueeze(1)
        if firsts is not None:
            hidden = hidden | (key_at < firsts[begin:end].unsqueeze(1))
        scores = scores.masked_fill(hidden, float("-inf"))  # [Hq, T, len]
        weights = scores.softmax(dim=-1).masked_fill(hidden.all(dim=1).unsqueeze(1), 0.0)
        out[begin:end] = torch.einsum("htl,lhd->thd", weights, values)
        logs[begin:end] = (scores.logsumexp(dim=-1) * LOG2_E).T
    return out, logs


def route_experts(logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    shares = logits.float().softmax(dim=-1)
    found = torch.sort(shares, dim=-1, descending=True, stable=True)
    weights, ids = found.values[:, :top_k], found.indices[:, :top_k]
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.contiguous(), ids.int()


def mix_experts(x: Tensor, gate_up: Experts, down: Experts, weights: Tensor, ids: Tensor) -> Tensor:
    down = unpacked_experts(down, x.shape[1])
    gate_up = unpacked_experts(gate_up, 2 * down.shape[2]).to(x.dtype)
    down = down.to(x.dtype)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):  # all: to know which are used, the host would have to wait for the device
        share = torch.where(ids == expert, weights, 0.0).sum(dim=1, keepdim=True)  # [T, 1]
        out += share * (silu_mul(x @ gate_up[expert].T) @ down[expert].T).float()
    return out.to(x.dtype)


def shared_prefix_attention(
    q: Tensor, *inputs: Tensor, shared: SharedPrefixes, scale: float, soft_cap: float = 0.0
) -> Tensor:
    """``paged_attention``: sharing changes what is read, not the result."""
    return paged_attention(q, *inputs, scale=scale, soft_cap=soft_cap)


def sharing_of(device: torch.device, group: int, head_dim: int, dtype: torch.dtype) -> Sharing | None:
    return None


def quantized_product(
    x: Tensor, weight: QuantizedWeight, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    y = x.float() @ dequantize(weight).T
    return (y if bias is None else y + bias.float()).to(out_dtype or x.dtype)


def dense_product(x: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def adapter_tables(
    count: int, rank: int, width: int, num_outputs: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    down = torch.zeros(count, rank, width, dtype=dtype, device=device)
    return down, torch.zeros(count, num_outputs, rank, dtype=dtype, device=device)


def add_adapters(y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Groups) -> Tensor:
    for adapter in adapters.ids.unique().tolist():
        if adapter >= 0:
            rows = (adapters.ids == adapter).nonzero().squeeze(1)
            added = x[rows].float() @ down[adapter].float().T @ up[adapter].float().T
            y[rows] = (y[rows].float() + added).to(y.dtype)
    return y


def apply_bitmask(logits: Tensor, mask: Tensor, *, rows: Tensor | None = None) -> Tensor:
    vocab_size = logits.shape[-1]
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = ((mask.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)[:, :vocab_size]  # [M, V]
    index = torch.arange(mask.shape[0], device=logits.device) if rows is None else rows
    logits[index] = logits[index].masked_fill(~allowed, float("-inf"))
    return logits


def apply_edits(logits: Tensor, edits: LogitEdits) -> Tensor:
    for row, token, value in zip(edits.bias_rows, edits.bias_ids, edits.bias_values, strict=True):
        logits[int(row), int(token)] += float(value)
    for p, row in enumerate(edits.rows):
        line = logits[int(row)]
        ids = torch.from_numpy(edits.ids[edits.starts[p] : edits.starts[p + 1]].astype(np.int64)).to(logits.device)
        seen = ids.unique()
        repetition = float(edits.repetition[p])
        line[seen] = torch.where(line[seen] > 0, line[seen] / repetition, line[seen] * repetition)
        generated, counts = ids[int(edits.prompt_lens[p]) :].unique(return_counts=True)
        line[generated] -= float(edits.frequency[p]) * counts + float(edits.presence[p])
    return logits


def sample(logits: Tensor, batch: SampleBatch) -> Sampled:
    token_ids = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    for r in range(logits.shape[0]):
        line, temperature = logits[r].double(), float(batch.temperature[r])
        if line.max() == float("-inf"):
            token_ids[r] = -1
            continue
        if temperature == 0.0:
            token_ids[r] = int((line == line.max()).nonzero()[0])
            continue
        weights = torch.exp((line - line.max()) / temperature)
        order = torch.sort(weights, descending=True, stable=True).indices
        kept = torch.ones_like(order, dtype=torch.bool)  # in the order of `order`
        if batch.top_k[r] > 0:
            kept[int(batch.top_k[r]) :] = False
        ranked = weights[order] * kept
        before = ranked.cumsum(0) - ranked
        kept &= before < float(batch.top_p[r]) * ranked.sum()
        kept[0] = True
        kept &= ranked >= float(batch.min_p[r]) * ranked[0]
        chosen = torch.zeros_like(weights)
        chosen[order[kept]] = weights[order[kept]]
        mass = chosen.cumsum(0)  # in the order of the vocabulary
        past = (mass > float(batch.draw[r]) * mass[-1]).nonzero()
        token_ids[r] = int(past[0]) if len(past) else int(chosen.nonzero()[-1])
    logprobs = gather_logprobs(logits, token_ids.clamp_min(0))
    return Sampled(token_ids, logprobs.masked_fill(token_ids < 0, float("-inf")))


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    chosen = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return (chosen.double() - logits.double().logsumexp(-1)).float()


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    top = torch.sort(logits, dim=-1, descending=True, stable=True)
    values = top.values[:, :k].double() - logits.double().logsumexp(-1, keepdim=True)
    return top.indices[:, :k], values.float()


def uniform(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    state = _mix(np.asarray(seed).astype(np.int64).view(np.uint64) + _GAMMA)
    state = _mix(state + (np.asarray(position).astype(np.int64).view(np.uint64) + np.uint64(1)) * _GAMMA)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
