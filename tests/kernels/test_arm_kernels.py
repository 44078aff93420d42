"""The kernels' tests and an engine in an Arm Python, which qemu's user mode runs.

``make test-arm-kernels`` prepares that Python in the folder that ``PHLOEM_ARM`` names, and runs them. Their twins are
the tests of these files themselves, on the machine that runs the suite.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import phloem
import pytest

QEMU, FOLDER = "qemu-aarch64", "PHLOEM_ARM"
log = logging.getLogger(__name__)
ROOT = Path(phloem.__file__).parent
pytestmark = pytest.mark.arm


@dataclass(frozen=True, slots=True)
class Cpu:
    """What qemu emulates, and what Linux says of a real CPU with these features: its part number and their names."""

    qemu: str
    part: str
    features: str
    isa: str


_EVERY = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
_N1 = f"{_EVERY} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp ssbs"
_V1 = f"{_N1} jscvt fcma sha3 sm3 sm4 sha512 sve asimdfhm dit uscat ilrcpc flagm dcpodp svei8mm svebf16 i8mm bf16"
CPUS = [
    Cpu("max", "0xd40", _V1, "neon_i8mm"),
    Cpu("neoverse-n1", "0xd0c", _N1, "neon_dotprod"),
    Cpu("cortex-a72", "0xd08", _EVERY, "portable"),
]
EVERYTHING = [
    f"test_{name}.py"
    for name in (
        *("vector", "ops", "integer", "linear", "recording", "quantized_kv", "sampling", "adapters", "experts"),
        *("machine_code", "attention"),
    )
]
CASES = [(CPUS[0], file) for file in EVERYTHING] + [
    (cpu, file) for cpu in CPUS[1:] for file in ("test_vector.py", "test_ops.py", "test_integer.py", "test_linear.py")
]


@pytest.fixture
def folder() -> Iterator[Path]:
    if FOLDER not in os.environ:
        pytest.skip(f"{FOLDER} is not set: make test-arm-kernels prepares an Arm Python and sets it")
    assert shutil.which(QEMU) is not None, f"{QEMU} is not installed: Debian's package qemu-user has it"
    yield Path(os.environ[FOLDER])


def run_on(cpu: Cpu, folder: Path, *arguments: str) -> str:
    """What the Arm Python prints with these arguments, run in the repository."""
    root = folder / "root"
    about = f"processor\t: 0\nFeatures\t: {cpu.features}\nCPU implementer\t: 0x41\nCPU part\t: {cpu.part}\n"
    (root / "proc/cpuinfo").write_text(about)
    # Python takes the script for itself, and starts other processes with it.
    python = root / f"usr/bin/python-on-{cpu.qemu}"
    python.write_text(
        f"""#!/bin/sh\nexec {QEMU} -0 "$0" -L "{root}" -cpu {cpu.qemu} "{root}/usr/bin/python3.11" "$@"\n"""
    )
    python.chmod(0o755)
    settings = {
        "PYTHONPATH": str(folder / "site"),
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        "NUMBA_CACHE_DIR": str(folder / "numba"),
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    found = subprocess.run(
        [python, *arguments], cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, f"{found.stdout[-6000:]}\n{found.stderr[-3000:]}"
    return found.stdout


@pytest.mark.parametrize("cpu", CPUS, ids=lambda cpu: cpu.qemu)
def test_an_arm_cpu_gets_its_set(cpu: Cpu, folder: Path) -> None:
    assert run_on(cpu, folder, "-c", "from phloem.cpu_isa import isa; print(isa().name)").split() == [cpu.isa]


@pytest.mark.parametrize(("cpu", "file"), CASES, ids=lambda value: getattr(value, "qemu", value))
def test_the_kernels_pass_their_tests_on_arm(cpu: Cpu, file: str, folder: Path) -> None:
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "-W", "default")
    ended = run_on(cpu, folder, "-m", "pytest", *plugins, f"tests/kernels/{file}").splitlines()[-1]
    passed = re.search(r"\b(\d+) passed", ended)
    assert passed is not None and int(passed[1]) > 0, ended
    log.info("%s on %s: %s", file, cpu.isa, ended.strip("= "))


TEXTS = """
import json, sys
from phloem import Engine
path, precision, prompts, num_tokens = json.loads(sys.argv[1])
with Engine(path, precision=precision, num_threads=1, num_slots=1024, max_seq_len=256) as engine:
    answers = engine.generate(prompts, temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    print(json.dumps([engine.info()["cpu_isa"], *(answer["output_ids"] for answer in answers)]))
"""


@pytest.mark.parametrize("cpu", CPUS[:1], ids=lambda cpu: cpu.qemu)
def test_an_engine_on_arm_writes_this_machine_s_texts(cpu: Cpu, folder: Path, tiny_model_path: Path) -> None:
    """Greedy, in float32."""
    given = json.dumps([str(tiny_model_path), "float32", ["Hello there", "Once upon a time", "1 2 3"], 24])
    here = subprocess.run([sys.executable, "-c", TEXTS, given], capture_output=True, text=True, check=True, cwd="/")
    set_there, *texts = json.loads(run_on(cpu, folder, "-c", TEXTS, given).splitlines()[-1])
    assert set_there == cpu.isa
    assert texts == json.loads(here.stdout.splitlines()[-1])[1:]
