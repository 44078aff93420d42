"""Launch configurations are compared through the interpreter: all variants are right, and no time is invented."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from phloem.tests.gpu import choose_kernels

choose_kernels()
gpu_variants = importlib.import_module("phloem.benchmarks.gpu_variants")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "phloem.benchmarks.gpu_variants", "--smoke", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_smoke_checks_two_variants_of_every_case(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "gpu_variants.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if " x " in line]
    cases = {row[0] for row in rows}
    assert len(rows) == 2 * len(cases) > 50
    for kind in ("prefill", "decode", "bfloat16", "int4", "int8", "fp8", "greedy", "top-p", "min-p", "bitmask"):
        assert any(kind in case for case in cases), kind
    assert "children" in table and "no times" in table
    for _, _, error, ms, *_ in rows:
        assert ms == "" and float(error) < 1e-2


def test_a_wrong_variant_is_a_fault_and_smoke_alone_writes_nothing(tmp_path: Path) -> None:
    """A reference that disagrees with all variants, in a process that runs the command."""
    code = (
        "import sys; sys.argv[1:] = ['sampling', '--smoke']\n"
        "from phloem.benchmarks import gpu_variants\n"
        "gpu_variants.reference.apply_bitmask = lambda logits, mask: logits + 1\n"
        "gpu_variants.main()"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_variants.md"
    before = results.read_bytes() if results.exists() else None
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 1 and "faults, the first: " in done.stderr
    assert "FAULT: bitmask of 2 x 300, half allowed, block_len 4096, num_warps 4: error" in done.stdout
    assert (results.read_bytes() if results.exists() else None) == before


def test_an_unknown_part_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_variants.py", "nothing", "--smoke"])
    with pytest.raises(SystemExit):
        gpu_variants.main()
    assert "parts are attention, products, sampling" in capsys.readouterr().err
