"""Folders that mlx-lm itself quantized, and those that it reads of ours: the same logits on both sides.

Needs ``pip install mlx-lm`` (on Linux with ``mlx[cpu]``). ``test_mlx`` does without, from the format's definition.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from phloem.runtime.config import EngineConfig
from phloem.runtime.models import load_model
from phloem.runtime.quantizing import quantize_model
from phloem.tests.runtime.models.stepping import Stepper
from phloem.tests.runtime.models.tiny import make_tiny_model

utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {"tied": True}, "qwen3_moe": MIXTURE}
TEXT = "An orchard on the north slope was planted in the spring, when the valley road was still gravel. " * 3


def difference(path: Path) -> float:
    """The greatest one of the logits, relative to the greatest logit."""
    model, _ = utils.load_model(path)
    model.set_dtype(mx.float32)
    theirs = np.array(model(mx.array([list(range(40))])))[0, -1]
    ours = Stepper(load_model(path, EngineConfig(model="x", precision="float32"))).prefill(0, np.arange(40)).numpy()
    return float(np.abs(ours.reshape(-1, len(theirs))[-1] - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("family", MODELS)
def test_what_mlx_lm_writes_is_read(family: str, bits: int, tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path / "plain", seed=0, family=family, **MODELS[family])
    model, config = utils.load_model(plain)
    quantized, config = utils.quantize_model(model, config, group_size=32, bits=bits)
    folder = tmp_path / "quantized"
    folder.mkdir()
    utils.save_model(folder, quantized)
    utils.save_config(config, folder / "config.json")
    for file in plain.glob("tokenizer*"):
        shutil.copy(file, folder)
    assert difference(folder) < 1e-4


@pytest.mark.parametrize(
    ("family", "scheme"),  # int4-awq refuses mixtures
    [(f, s) for f in MODELS for s in ("int8", "int4-g32", "int4-awq") if (f, s) != ("qwen3_moe", "int4-awq")],
)
def test_mlx_lm_reads_what_is_written(family: str, scheme: str, tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path / "plain", seed=0, family=family, **MODELS[family])
    assert (
        difference(quantize_model(plain, tmp_path / "out", scheme, folder_format="mlx", calibration=TEXT).path) < 1e-4
    )
