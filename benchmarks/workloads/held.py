"""The file of the workloads' figures: by model, then by part, workload and system."""

import json
from pathlib import Path
from typing import Any

from .. import RESULTS, save

OUT = RESULTS / "workloads.json"


def held_figures(path: Path = OUT) -> dict[str, Any]:
    """The figures of each model that ``--save`` has written."""
    return json.loads(path.read_text())["models"] if path.exists() else {}


def keep(
    path: Path,
    model: str,
    about: dict[str, Any],
    found: dict[str, Any],
    equal: dict[str, Any],
    *,
    part: str = "workloads",
) -> Path:
    """Write the figures of ``model``. Those of other models, workloads and parts stay; a row of ``found`` replaces the
    held one, since only figures of one run may be compared.
    """
    held: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"models": {}}
    entry = held["models"].setdefault(model, {"workloads": {}, "ablations": {}, "same_answers": {}})
    entry[part].update(found)
    entry["same_answers"].update(equal)
    entry[f"about_{part}"] = about
    save(path, held)
    return path
