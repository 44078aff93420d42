"""Rope frequencies are those of Hugging Face transformers, for each kind of scaling."""

from typing import Any

import msgspec
import pytest
import torch
import transformers
from phloem.runtime.layers.rotary import cos_sin_table, rope_frequencies
from phloem.runtime.weights.model_config import FactorsRope, config_from_hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SIZES = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.5},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn tuned": {
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "attention_factor": 1.25,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_are_those_of_transformers(name: str, theta: float) -> None:
    kind = name.split()[0]
    rope = {"rope_type": kind, "rope_theta": theta, **SCALINGS[name]}
    theirs = transformers.LlamaConfig(**{**SIZES, "rope_parameters": dict(rope)})
    want, want_factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    got, factor = rope_frequencies(config_from_hf({**SIZES, "rope_parameters": rope}, source="config.json"))
    assert torch.allclose(got, want, rtol=2e-6, atol=0)
    assert factor == pytest.approx(want_factor)


def test_old_and_new_names_of_the_same_scaling_agree() -> None:
    old = {**SIZES, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 3.0}}
    new = {**SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 3.0}}
    assert config_from_hf(old, source="a") == config_from_hf(new, source="b")


def test_the_table_holds_cosines_then_sines() -> None:
    config = config_from_hf({**SIZES, "rope_theta": 1e4}, source="config.json")
    table = cos_sin_table(config, 50)
    assert (table.shape, table.dtype) == ((50, 64), torch.float32)
    angles = 49.0 * 1e4 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert torch.allclose(table[49].double(), torch.cat((angles.cos(), angles.sin())), atol=1e-5)


def test_factors_divide_each_frequency() -> None:
    plain = config_from_hf(SIZES, source="config.json")
    factors = tuple(1.0 + i / 4 for i in range(32))
    got, _ = rope_frequencies(msgspec.structs.replace(plain, rope_scaling=FactorsRope(factors=factors)))
    assert torch.allclose(got * torch.tensor(factors), rope_frequencies(plain)[0])
