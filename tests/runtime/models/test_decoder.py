"""Logits are those of Hugging Face transformers, float32, for every family, however the tokens are cut into steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.runtime.config import EngineConfig
from phloem.runtime.models import Model, load_model
from phloem.tests.runtime.models.hf_reference import hf_from_folder, hf_from_gguf, hf_logits
from phloem.tests.runtime.models.stepping import Stepper, greedy
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model

FLOAT32 = EngineConfig(model="tiny", precision="float32")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPERTS: dict[str, Any] = {
    "family": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tied": True},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "llama_mha_wide_heads": {"num_kv_heads": 4, "head_dim": 32},
    "llama_bfloat16_file": {"dtype": torch.bfloat16},
    "llama_three_files": {"num_files": 3},
    "llama_linear_rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_llama3_rope": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral_window": {"family": "mistral", "sliding_window": 7},
    "qwen2": {"family": "qwen2"},
    "qwen2_window": {"family": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen2_yarn": {
        "family": "qwen2",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen3": {"family": "qwen3"},
    "qwen3_wide_heads": {"family": "qwen3", "head_dim": 32, "tied": True},
    "qwen3_moe": EXPERTS,
    "qwen3_moe_normalised": EXPERTS | {"norm_topk_prob": True},
    "qwen3_moe_one_expert": EXPERTS | {"num_experts": 3, "num_experts_per_tok": 1, "tied": True},
}


def random_ids(count: int, *, vocab_size: int = 259, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, count).astype(np.int32)


def assert_equal_logits(ours: torch.Tensor, theirs: torch.Tensor, *, tolerance: float = 1e-4) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.fixture(scope="module")
def tiny(tiny_model_path: Path) -> Model:
    return load_model(tiny_model_path, FLOAT32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, seed=3, **VARIANTS[variant])
    model, ids = load_model(path, FLOAT32), random_ids(75)
    want = hf_logits(hf_from_folder(path), ids)
    assert_equal_logits(Stepper(model).prefill(0, ids), want)
    assert_equal_logits(Stepper(model).prefill(0, ids, chunk=16), want)


@pytest.mark.parametrize(
    ("family", "kinds", "hidden_size"),
    [
        ("llama", {}, 64),
        ("llama", {"": "Q4_0", "embed": "Q8_0"}, 64),
        ("llama", {"": "Q4_1", "v_proj": "Q5_1", "down": "Q5_0"}, 64),
        ("llama", {"": "Q4_K", "v_proj": "Q6_K", "embed": "Q5_K"}, 256),
        ("llama", {"": "F16", "lm_head": "BF16"}, 64),
        ("qwen2", {"": "Q8_0"}, 64),
        ("qwen3", {"": "Q4_0"}, 64),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_gguf_file_are_those_of_transformers(
    family: str, kinds: dict[str, str], hidden_size: int, tied: bool, tmp_path: Path
) -> None:
    path = make_tiny_gguf(
        tmp_path / "tiny.gguf", seed=4, family=family, kinds=kinds, tied=tied, hidden_size=hidden_size
    )
    ids = random_ids(40, vocab_size=96)
    want = hf_logits(hf_from_gguf(path), ids)
    assert_equal_logits(Stepper(load_model(path, FLOAT32)).prefill(0, ids), want)


def test_rope_factors_of_a_gguf_file_are_llama_3_s_scaling(tmp_path: Path) -> None:
    plain = 1e4 ** (-np.arange(8) / 8)
    turns = 64 * plain / (2 * np.pi)
    blend = np.clip((turns - 1) / (4 - 1), 0, 1)
    factors = 1 / ((1 - blend) / 8 + blend)
    gguf_path = make_tiny_gguf(tmp_path / "tiny.gguf", seed=5, rope_factors=factors)
    scaling = {**LLAMA3, "original_max_position_embeddings": 64}
    hf_path = make_tiny_model(
        tmp_path / "hf", seed=5, vocab_size=96, tied=True, max_positions=512, rope_scaling=scaling
    )
    ids = random_ids(90, vocab_size=96)
    ours, theirs = (Stepper(load_model(path, FLOAT32)).prefill(0, ids) for path in (gguf_path, hf_path))
    assert_equal_logits(ours, theirs)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_no_logits(tiny: Model, chunk: int) -> None:
    ids = random_ids(100)
    whole = Stepper(tiny).prefill(0, ids)
    assert_equal_logits(Stepper(tiny).prefill(0, ids, chunk=chunk), whole, tolerance=1e-5)


def test_prefill_and_decode_rows_share_a_step(tiny: Model) -> None:
    ids = [random_ids(n, seed=n) for n in (1, 30, 17, 64, 5)]
    alone = [Stepper(tiny).prefill(0, each) for each in ids]
    stepper = Stepper(tiny)
    stepper.step([(i, each[:-1], 0) for i, each in enumerate(ids[1:], start=1)])
    stepper.step([(1, ids[1][-1:], 1)])
    got = stepper.step([(4, ids[4][-1:], 1), (0, ids[0], 1), (3, ids[3][-1:], 1), (2, ids[2][-1:], 1)])
    assert_equal_logits(got, torch.stack([alone[i][-1] for i in (4, 0, 3, 2)]), tolerance=1e-5)


def test_logits_come_for_the_last_positions_asked_for(tiny: Model) -> None:
    first, second = random_ids(20, seed=1), random_ids(11, seed=2)
    alone = [Stepper(tiny).prefill(0, each) for each in (first, second)]
    got = Stepper(tiny).step([(0, first, 3), (1, second, 5)])
    assert_equal_logits(got, torch.cat((alone[0][-3:], alone[1][-5:])), tolerance=1e-5)


def test_a_step_without_logits_still_writes_keys_and_values(tiny: Model) -> None:
    ids = random_ids(50)
    stepper = Stepper(tiny)
    assert stepper.step([(0, ids[:49], 0)]).shape == (0, 259)
    got = stepper.step([(0, ids[49:], 1)])
    assert_equal_logits(got, Stepper(tiny).prefill(0, ids)[-1:], tolerance=1e-5)


def test_sequences_that_share_slots_are_as_if_each_had_its_own(tiny: Model) -> None:
    prefix, tails = random_ids(40), [random_ids(12, seed=s) for s in (7, 8, 9)]
    stepper = Stepper(tiny)
    stepper.step([(0, prefix, 0)])
    for child in (1, 2, 3):
        stepper.fork(0, child)
    got = stepper.step([(i, tail, 12) for i, tail in enumerate(tails, start=1)])
    alone = [Stepper(tiny).prefill(0, np.concatenate((prefix, tail)))[-12:] for tail in tails]
    assert_equal_logits(got, torch.cat(alone), tolerance=1e-5)


def test_greedy_tokens_are_equal_alone_batched_and_chunked(tiny: Model) -> None:
    prompts = [random_ids(n, seed=n) for n in (1, 2, 3, 9, 33, 64, 65, 120, 40, 41, 42, 43, 44, 45, 46, 47)]
    alone = [greedy(tiny, [prompt], 12)[0] for prompt in prompts]
    assert greedy(tiny, prompts, 12) == alone
    assert greedy(tiny, prompts, 12, chunk=64) == alone
    assert greedy(tiny, prompts, 12, chunk=5) == alone
    assert len({tuple(tokens) for tokens in alone}) > 8  # the model's answers do differ


@pytest.mark.parametrize("precision", ["auto", "bfloat16", "int4"])
def test_fast_precisions_stay_near_float32(precision: Any, tmp_path: Path) -> None:
    """With random weights, which show swapped or wrongly scaled tensors. ``test_smollm2`` measures trained ones."""
    kinds = {"": "Q4_1", "v_proj": "Q5_1", "embed": "Q8_0"}
    path = make_tiny_gguf(tmp_path / "tiny.gguf", seed=6, kinds=kinds)
    ids = random_ids(60, vocab_size=96)
    want = Stepper(load_model(path, FLOAT32)).prefill(0, ids)
    model = load_model(path, EngineConfig(model="tiny", precision=precision))
    for chunk in (1, 64):
        got = Stepper(model).prefill(0, ids, chunk=chunk)
        assert torch.nn.functional.cosine_similarity(got, want).mean() > (0.985 if precision == "int4" else 0.999)
