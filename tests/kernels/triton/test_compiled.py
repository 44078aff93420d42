"""Every Triton kernel compiles ahead of time for the shipped architectures, without spilled registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from phloem.kernels.triton.config import CONFIGS

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes a block may have


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The table's cells, compiled in a new process that does not use Triton's interpreter."""
    out = tmp_path_factory.mktemp("resources") / "table.md"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "phloem.benchmarks.kernel_resources", "--out", str(out)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return _cells(out.read_text())


def _cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if " sm_" in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_no_register_is_spilled_and_shared_memory_is_there(rows: list[list[str]]) -> None:
    assert {row[1] for row in rows} == {f"sm_{arch}" for arch in CONFIGS}
    for name, arch, _, registers, shared, spilled in rows:
        # Prefill on sm_90 has half of the registers it would take: two programs at a time are a third faster.
        assert int(spilled) <= (96 if "prefill" in name and arch == "sm_90" else 0), name
        assert int(registers) <= 255 and int(shared.replace(",", "")) <= SHARED_LIMIT[int(arch[3:])], name


def test_every_kernel_is_in_the_table_and_the_table_is_the_one_kept(rows: list[list[str]]) -> None:
    names = " ".join(row[0] for row in rows)
    for kernel in (
        *("attention decode", "attention prefill", "attention join", "rms_norm", "rope_write_kv", "silu_mul"),
        *("sample", "logit bias", "penalties count", "penalties"),
        *(
            "attention shared prefix",
            "attention shared suffix",
            "attention decode Llama-3-8B fp8 pool",
            "attention decode DeepSeek-V2-Lite",
            "attention prefill DeepSeek-V3 fp8 pool",
            "attention prefill Gemma-3-270M",
            "attention prefill DeepSeek-V3 float32",
            "attention shared prefix Llama-3-8B float32",
            "grouped product float32",
        ),
        *("norm_rope_write_kv 128", "rope_write_kv 128 fp8 pool", "gelu_mul", "route 8 of 128 experts"),
        *("product int4, one row", "product bfloat16, one row", "unpack int4", "unpack fp8"),
        *("product int4, few rows", "product int8, many rows", "product fp8, few rows"),
        *("grouped product, few rows", "grouped product added, many rows", "grouped product fp8, few rows"),
        *("grouped product int4, many rows", "grouped product int8, few rows"),
    ):
        assert kernel in names
    kept = Path(__file__).parents[3] / "benchmarks" / "results" / "kernel_resources.md"
    assert [row[:3] for row in _cells(kept.read_text())] == [row[:3] for row in rows]
