"""The GPU benchmark runs without a GPU, through the interpreter: it checks every kernel and invents no time."""

import json
import subprocess
import sys
from pathlib import Path

from phloem.benchmarks import gpu


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
        "engine",
    }
    for figure in figures:
        assert figure["ms"] is figure["roofline_ms"] is figure["other_ms"] is None
        assert figure["error"] is None or figure["error"] < 1e-4
    assert "no times" in (tmp_path / "gpu.md").read_text()


def test_an_unknown_part_and_a_missing_device_are_named(tmp_path: Path) -> None:
    assert "parts are decode_attention" in run("nothing", "--smoke", "--out", str(tmp_path)).stderr
    if not gpu.torch.cuda.is_available():
        assert "--smoke" in run("--out", str(tmp_path)).stderr
