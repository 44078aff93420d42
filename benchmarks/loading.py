"""What loading a model's weights takes: time, CPU time, and memory beside what the model then holds.

    python -m benchmarks.loading [--model qwen2.5-coder-1.5b] [--rounds 3] [--precision auto]

Each load is a process of its own, which first loads a tiny model so that libraries and kernels are there. ``first``
packs the weights of a file that lies in the page cache. ``copy`` does so too and then writes the packed copy, as a
server does beside its work. ``later`` reads that copy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from phloem import kernels
from phloem.runtime.config import EngineConfig, Precision
from phloem.runtime.models import load_model
from phloem.runtime.planning.host import write_small_model
from phloem.runtime.weights.resolve import resolve_model

from . import print_header


def measure(path: Path, *, precision: Precision, has_copy: bool) -> dict[str, float]:
    """Of one load, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.gguf"
        write_small_model(small)
        kernels.warm_up()
        load_model(small, EngineConfig(model=str(small), precision=precision, repack_cache=False))
    before = _status()
    later: list[Any] = []
    times = time.perf_counter(), time.process_time()
    config = EngineConfig(model=str(path), precision=precision, repack_cache=has_copy)
    model = load_model(path, config, later=later.append)  # held until memory was looked at
    wall_s, cpu_s = time.perf_counter() - times[0], time.process_time() - times[1]
    after = _status()
    del model
    start = time.perf_counter()
    for work in later:
        work()
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "held_mb": (after["RssAnon"] - before["RssAnon"]) / 1e6,
        "peak_mb": (after["VmHWM"] - before["VmRSS"]) / 1e6,
        "write_s": time.perf_counter() - start,
    }


def _status() -> dict[str, int]:
    """Bytes, from Linux's /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) << 10 for name, size, _ in fields}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--child", choices=("first", "copy", "later"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        found = measure(Path(args.model), precision=args.precision, has_copy=args.child != "first")
        print(json.dumps(found))
        return 0
    path = resolve_model(args.model).resolve()
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    size = sum(file.stat().st_size for file in files)
    print_header(file_mb=round(size / 1e6, 1))
    for file in files:  # into the page cache
        with file.open("rb") as data:
            while data.read(1 << 24):
                pass
    columns = ("wall s", "CPU s", "held MB", "peak MB", "peak/held", "peak/file", "write s")
    print(f"{'load':<6}", *(f"{name:>9}" for name in columns))
    with tempfile.TemporaryDirectory() as home:
        for kind in ("first", "copy", *["later"] * args.rounds, *["first"] * (args.rounds - 1)):
            command = [sys.executable, "-m", "benchmarks.loading", "--model", str(path), "--precision", args.precision]
            done = subprocess.run(
                [*command, "--child", kind],
                env=os.environ | {"PHLOEM_HOME": home},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            row = json.loads(done.stdout)
            shares = row["peak_mb"] / row["held_mb"], row["peak_mb"] * 1e6 / size
            values = (row["wall_s"], row["cpu_s"], row["held_mb"], row["peak_mb"], *shares, row["write_s"])
            print(f"{kind:<6}", *(f"{value:>9.2f}" for value in values), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
