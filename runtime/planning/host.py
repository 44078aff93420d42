"""The host's share of a step, without the kernels, measured with a model of very few weights.

Planning, embedding, sampling's Python, accepting and sending cost the same for a model of any size. With a large model
the weights evict the host's data from the processor's caches; here a pass over SWEPT_BYTES between steps does.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import gguf
import numpy as np

from ..config import EngineConfig
from ..engine import EngineCore
from ..profiling import Load, run_load

FEW, MANY = 1, 16  # rows
NEW_TOKENS = 48
REPEATS = 2
SWEPT_BYTES = 64 << 20
HIDDEN, HEADS = 64, 4
BYTE_TOKENS = 256


def host_seconds(num_threads: int = 0) -> tuple[float, float]:
    """Seconds of (a step, each of its rows)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.gguf"
        write_small_model(path)
        engine = EngineCore(EngineConfig(model=str(path), speculative="off", num_threads=num_threads))
        try:
            few, many = (_step_s(engine, rows) for rows in (FEW, MANY))
        finally:
            engine.close()
    row_s = max(0.0, (many - few) / (MANY - FEW))
    return max(few - FEW * row_s, few / 2), row_s


def _step_s(engine: EngineCore, rows: int) -> float:
    load = Load(rows, prompt_tokens=8, new_tokens=NEW_TOKENS)
    run_load(engine, load)
    weights = np.ones(SWEPT_BYTES // 8)
    times = [ms for _ in range(REPEATS) for ms in run_load(engine, load, between=weights.sum).decode_ms]
    return median(times) / 1e3


def write_small_model(path: Path) -> None:
    """Write a GGUF file with one layer of random 4-bit weights and one token for every byte."""
    numbers = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(BYTE_TOKENS))]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3] + [6] * BYTE_TOKENS)
    writer.add_eos_token_id(2)

    def matrix(name: str, outputs: int, inputs: int, kind: gguf.GGMLQuantizationType) -> None:
        weight = numbers.standard_normal((outputs, inputs), dtype=np.float32) * np.float32(inputs**-0.5)
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)

    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    four, eight = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
    matrix("token_embd.weight", len(tokens), HIDDEN, eight)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        matrix(f"blk.0.{name}.weight", HIDDEN, HIDDEN, four)
    for name in ("ffn_gate", "ffn_up"):
        matrix(f"blk.0.{name}.weight", 2 * HIDDEN, HIDDEN, four)
    matrix("blk.0.ffn_down.weight", HIDDEN, 2 * HIDDEN, four)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
