"""The GPU benchmark runs without a GPU, through the interpreter: it checks every kernel and invents no time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from phloem.benchmarks import gpu
from phloem.benchmarks.gpu_engine import WORKLOADS, least_seconds, requests, weight_count
from phloem.benchmarks.roofline import H200
from phloem.benchmarks.shapes import write_shape
from phloem.runtime.memory import slot_size_bytes
from phloem.runtime.weights.safetensors_file import read_folder_config


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "phloem.benchmarks.gpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_smoke_checks_every_part_and_leaves_times_empty(tmp_path: Path) -> None:
    done = run("--smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    assert {figure["part"] for figure in figures} == {
        "decode attention",
        "prefill attention",
        "rms_norm + residual",
        "silu_mul",
        "rope + KV write",
        "bitmask",
        "sampling",
        "product bfloat16",
        *(f"product {kind}" for kind in ("int4", "int8", "fp8")),
        *("shared-prefix attention", "decode attention, fp8 pool"),
        *("experts", "routing", "adapters", "gelu_mul", "norm + rope + KV write"),
        *("collective to itself", "split logits"),
        "engine",
    }
    for figure in figures:
        assert figure["ms"] is figure["roofline_ms"] is figure["other_ms"] is None
        assert figure["error"] is None or figure["error"] < 1e-4
    assert "no times" in (tmp_path / "gpu.md").read_text()


def test_the_engine_s_roofline_is_that_of_the_published_workload(tmp_path: Path) -> None:
    """nano-vllm's 256 requests: 133,966 tokens out, 13.87 TB of keys and values read, about 36,000 tokens/s at best."""
    prompts, lengths = requests(WORKLOADS[0])
    assert sum(lengths) == 133_966
    config = read_folder_config(write_shape("Qwen3-0.6B", tmp_path, is_toy=False))
    slot = slot_size_bytes(config, torch.bfloat16)
    contexts = sum(len(p) + i for p, n in zip(prompts, lengths, strict=True) for i in range(n))
    assert round(contexts * slot / 1e12, 2) == 13.87
    assert 35_000 < sum(lengths) / least_seconds(config, prompts, lengths, H200) < 37_000


def test_weights_of_the_published_shapes_are_as_many_as_their_names_say(tmp_path: Path) -> None:
    def counted(name: str, rows: int) -> float:
        return weight_count(read_folder_config(write_shape(name, tmp_path, is_toy=False)), rows) / 1e9

    assert 0.55 < counted("Qwen3-0.6B", 1) < 0.65
    assert 7.4 < counted("Llama-3-8B", 1) < 8.1
    assert 2.8 < counted("Qwen3-30B-A3B", 1) < 3.5
    assert 29 < counted("Qwen3-30B-A3B", 1000) < 31


def test_an_unknown_part_and_a_missing_device_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, "--out", str(tmp_path)])
        with pytest.raises(SystemExit):
            gpu.main()
        return capsys.readouterr().err

    assert "parts are decode_attention" in refusal("nothing", "--smoke")
    if not torch.cuda.is_available():
        assert "--smoke" in refusal()
