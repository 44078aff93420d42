"""From a user's name of a model to its file or folder."""

from __future__ import annotations

import difflib
import logging
from pathlib import Path

from ...protocol.errors import UnknownModel
from .aliases import ALIASES
from .hub import fetch_from_hub, is_hub_name
from .pull import Progress, is_pulled, pull

log = logging.getLogger(__name__)


def resolve_model(name: str, *, home: Path | None = None, progress: Progress | None = None) -> Path:
    """A GGUF file, or a folder with config.json and safetensors or ONNX.

    ``name`` is an alias, a path, or a hub name (``org/name``, ``org/name:file.gguf``); aliases and hub names are
    fetched if they are missing. Raises UnknownModel, which lists what may be given.
    """
    alias = ALIASES.get(name.lower())
    if alias is not None:
        if progress is None and not is_pulled(alias, home):
            log.warning("fetching %s (%s, %.0f MB)", alias.name, alias.about, alias.size_bytes / 1e6)
        return pull(alias.name, home=home, progress=progress)
    path = Path(name).expanduser()
    if name and path.exists():
        return _model_at(path.absolute())
    if is_hub_name(name) and (":" in name or not name.endswith(".gguf")):
        return fetch_from_hub(name)
    close = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UnknownModel(
        f"no model {name!r}: {hint}it is neither a path here nor an alias; give an alias ({', '.join(ALIASES)}), "
        "the path of a .gguf file or of a folder with config.json and safetensors or ONNX, or a Hugging Face name "
        "(org/name)"
    )


def _model_at(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnknownModel(
                f"{path} is not a .gguf file; for safetensors give the folder that also holds config.json"
            )
        return path
    if (path / "config.json").is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} .gguf files; give one of {', '.join(map(str, found))}" if found else "no .gguf file"
    raise UnknownModel(f"{path} holds no config.json and {what}")
