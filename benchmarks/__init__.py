"""Measurements of Phloem. Each prints the machine, the commit and the command, and writes its figures as JSON."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")  # as in an engine's process; numpy reads it when it is imported

import numpy as np
from phloem import processor

RESULTS = Path(__file__).parent / "results"


def header() -> dict[str, Any]:
    """Where and how a figure was measured: machine, versions, commit and command."""
    return {
        "machine": machine(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def print_header(**more: Any) -> dict[str, Any]:
    """Print ``header`` and ``more`` line by line, and return them."""
    about = header() | more
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    return about


def save(path: Path, report: dict[str, Any]) -> None:
    """Write ``report`` to ``path`` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def machine() -> str:
    return f"{processor.name()}, {processor.num_cores()} cores, {platform.system()} {platform.machine()}"


def commit() -> str:
    """The short commit hash; ``+`` follows it if a tracked file has uncommitted changes."""
    root = Path(__file__).parent.parent
    try:
        git = ["git", "-C", str(root)]
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+" if changes.stdout.strip() else "")


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).stem


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def percentiles(values: list[float]) -> dict[str, float]:
    """Mean, median, 90th, 99th and 99.9th percentile, and the largest; nothing of no values."""
    if not values:
        return {}
    data = np.array(values)
    quantiles = {f"p{q}": np.percentile(data, q) for q in (50, 90, 99, 99.9)}
    found = {"mean": data.mean(), **quantiles, "max": data.max()}
    return {name: round(float(value), 3) for name, value in found.items()}
