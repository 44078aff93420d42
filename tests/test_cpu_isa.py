"""The table of instruction sets: which one a CPU gets, and what forcing one does."""

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import phloem
import pytest
from llvmlite import binding
from numba import config
from phloem import cpu_isa
from phloem.cpu_isa import ISAS, IsaError, best, choose, restricted
from phloem.doctor import report
from phloem.kernels.cpu import bfloat
from phloem.protocol.errors import InvalidParams

X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.mark.skipif(not X86, reason="names of x86 features")
@pytest.mark.parametrize(
    ("features", "name"),
    [
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512vnni", "avx512_vnni"),
        ("avx2 fma f16c avx512f avx512bw avx512vl", "avx2"),
        ("avx2 fma f16c avxvnni", "avx_vnni"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 f16c", "portable"),
        ("", "portable"),
    ],
)
def test_a_cpu_gets_the_best_set_that_it_has_all_of(features: str, name: str) -> None:
    assert best(frozenset(features.split())).name == name


@pytest.mark.parametrize(
    ("told", "name", "for_numba"),
    [
        ("neon dotprod i8mm bf16 sve", "neon_i8mm", "+bf16,+dotprod,+i8mm,+lse,+neon,+sve"),
        ("neon dotprod", "neon_dotprod", "-bf16,+dotprod,-i8mm,+lse,+neon,-sve"),
        ("neon", "portable", "-bf16,-dotprod,-i8mm,+lse,+neon,-sve"),
    ],
)
def test_an_arm_cpu_gets_what_the_system_tells_where_llvm_sees_less(
    told: str, name: str, for_numba: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = {feature: feature in told.split() for feature in ("neon", "dotprod", "i8mm", "bf16", "sve")}
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(cpu_isa, "arm_features", lambda: has)
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"neon": True, "lse": True})
    one = best(frozenset(feature for feature, is_there in cpu_isa.host_features().items() if is_there))
    assert one.name == name
    assert restricted(one, cpu_isa.host_features()) == for_numba


def test_numba_is_told_the_features_of_an_arm_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(one for one in ISAS if one.name == "neon_dotprod")
    monkeypatch.setattr(cpu_isa, "isa", lambda: one)
    monkeypatch.setattr(cpu_isa, "host_features", lambda: {"dotprod": True, "sve": True})
    monkeypatch.setattr(config, "CPU_FEATURES", None)
    cpu_isa.tell_numba.__wrapped__()
    assert config.CPU_FEATURES is None or not X86
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    cpu_isa.tell_numba.__wrapped__()
    assert config.CPU_FEATURES == "+dotprod,-sve"


def test_code_of_a_set_leaves_out_what_is_better() -> None:
    host = dict.fromkeys(("avx", "avx2", "fma", "avxvnni", "avx512f", "amx-int8", "sse4.2"), True)
    named = {one.name: one for one in ISAS}
    assert restricted(named["avx2"], host) == "-amx-int8,+avx,+avx2,-avx512f,-avxvnni,+fma,+sse4.2"
    assert restricted(named["portable"], host) == "-amx-int8,-avx,-avx2,-avx512f,-avxvnni,-fma,+sse4.2"


@pytest.mark.skipif(not X86, reason="an x86 machine lacks a set of Arm's")
def test_a_set_that_the_machine_lacks_is_refused_by_name() -> None:
    with pytest.raises(IsaError, match="'neon_dotprod': this machine lacks dotprod, neon; it can run .*portable"):
        choose("neon_dotprod")


def test_another_set_cannot_be_chosen_later() -> None:
    assert choose("auto") is cpu_isa.isa() is choose(cpu_isa.isa().name)
    if cpu_isa.isa().name == "portable":
        pytest.skip("there is no other set")
    with pytest.raises(IsaError, match=r"this process uses \w+; choose it in a new process"):
        choose("portable")


@pytest.mark.skipif(not X86, reason="an x86 machine lacks a set of Arm's")
@pytest.mark.parametrize("start", [phloem.Engine, phloem.Runtime])
def test_an_engine_refuses_a_set_that_the_machine_lacks(start: Callable[..., Any], tiny_model_path: Path) -> None:
    with pytest.raises(InvalidParams, match="cpu_isa='neon_i8mm': this machine lacks") as caught:
        start(str(tiny_model_path), cpu_isa="neon_i8mm")
    assert caught.value.where == "cpu_isa"


def test_an_engine_and_doctor_name_the_set(tiny_model_path: Path) -> None:
    with phloem.Engine(str(tiny_model_path), num_slots=64, max_seq_len=64) as engine:
        assert engine.info()["cpu_isa"] == cpu_isa.isa().name
    assert report()["kernels"]["CPU kernels"].startswith(cpu_isa.available()[0].name)


FORCED = """
from phloem.cpu_isa import choose
choose("portable")
import torch
from phloem.kernels.linear import PackedLinear
from numba.core.registry import cpu_target
x, q = torch.linspace(-1, 1, 64).view(2, 32), torch.arange(512).view(16, 32) % 16
y = PackedLinear((q.to(torch.uint8), torch.ones(16, 1), torch.ones(16, 1)), precision="int16")(x)
exact = x.double() @ (q.double() - 7).T
assert (y - exact).norm() < 1e-4 * exact.norm(), (y, exact)
features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
print(torch.backends.cpu.get_cpu_capability(), "+avx2" in features)
"""


@pytest.mark.skipif(not X86, reason="elsewhere torch has no level without vectors")
def test_a_forced_set_restricts_numba_and_torch() -> None:
    found = subprocess.run([sys.executable, "-c", FORCED], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["DEFAULT", "False"]


@pytest.mark.parametrize("one", ISAS, ids=lambda one: one.name)
def test_a_kernel_uses_bfloat16_pairs_only_in_a_set_that_has_them(
    one: cpu_isa.Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM ends the process at an instruction that the chosen set leaves out."""
    monkeypatch.setattr(bfloat, "isa", lambda: one)
    monkeypatch.setattr(bfloat, "cpu_features", lambda: frozenset({"avx512bf16"}))
    assert bfloat.has_bfloat16_pairs.__wrapped__() == (not "avx512bf16".startswith(one.left_out))
    assert one.name != "portable" or not bfloat.has_bfloat16_pairs.__wrapped__()
