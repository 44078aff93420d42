"""From a model's files to its ``Tokenizer`` and ``ModelTemplate``. Reads GGUF files and folders with tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from ...protocol.errors import UnknownModel
from ..weights.damage import refuse_damage
from .chat_template import ModelTemplate
from .folder import folder_template, folder_tokenizer
from .gguf_vocab import gguf_template, gguf_tokenizer
from .tokenizer import Tokenizer


def load_tokenizer(path: Path | str) -> Tokenizer:
    """From a ``.gguf`` file or a folder with ``tokenizer.json``; UnknownModel or Unsupported says what is wrong."""
    path = _existing(path)
    with refuse_damage(path):
        return folder_tokenizer(path) if path.is_dir() else gguf_tokenizer(path)


def load_chat_template(path: Path | str, tokenizer: Tokenizer) -> ModelTemplate | None:
    """The model's own chat template; None where it has none (a base model)."""
    path = _existing(path)
    with refuse_damage(path):
        source = folder_template(path) if path.is_dir() else gguf_template(path)
    return None if source is None else ModelTemplate(source, tokenizer)


def _existing(path: Path | str) -> Path:
    path = Path(path)
    if not path.exists():
        raise UnknownModel(f"{path} does not exist; give a .gguf file or a folder with tokenizer.json")
    return path
