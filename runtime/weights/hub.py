"""Models by their name on the Hugging Face hub: chooses the files; the hub's client fetches and caches them."""

from __future__ import annotations

import re
from pathlib import Path

from ...protocol.errors import UnknownModel

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?::(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?")
_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_UNWANTED = ["consolidated*", "original/*", "onnx/*"]


def is_hub_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def fetch_from_hub(name: str) -> Path:
    """The folder of ``org/name`` or ``org/name@revision``, or the GGUF file of ``org/name:file.gguf``.

    Files in the hub's cache need no network. Raises UnknownModel with the reason where a model cannot be fetched.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, name
    repo, file, revision = match["repo"], match["file"], match["revision"]
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=_WANTED if file is None else [file],
                ignore_patterns=_UNWANTED if file is None else None,
            )
        )
    except errors.GatedRepoError as error:
        raise UnknownModel(
            f"{repo} on the Hugging Face hub is gated: accept its licence there, then run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UnknownModel(f"the Hugging Face hub has no model {repo!r}, or it is private (`hf auth login`)") from error
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        # LocalEntryNotFoundError, a kind of EntryNotFoundError, is what the client raises without a network.
        if not isinstance(error, errors.LocalEntryNotFoundError):
            raise UnknownModel(f"the Hugging Face hub has no {name!r}: {_first_line(error)}") from error
        raise _unreachable(name, error) from error
    except Exception as error:
        raise _unreachable(name, error) from error
    if file is not None:
        if not (folder / file).is_file():
            raise UnknownModel(f"{repo} on the Hugging Face hub has no file {file!r}")
        return folder / file
    if not any(folder.glob("*.safetensors")):
        raise UnknownModel(f"{repo} on the Hugging Face hub has no safetensors; for a GGUF file give {repo}:FILE.gguf")
    return folder


def _unreachable(name: str, error: Exception) -> UnknownModel:
    return UnknownModel(
        f"{name} could not be fetched from the Hugging Face hub ({type(error).__name__}: {_first_line(error)}); check "
        "the network, or give a folder or a .gguf file that is already here"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no more is known")
