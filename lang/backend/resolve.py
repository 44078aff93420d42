"""Which backend is meant by what a program was given."""

from __future__ import annotations

from typing import Any

from ...protocol.errors import InvalidRequest, Unsupported
from ..global_config import global_config
from .base_backend import BaseBackend
from .phloem_backend import PhloemBackend


def resolve_backend(backend: Any) -> BaseBackend:
    """``backend``, or where it is None the default one."""
    chosen = backend if backend is not None else global_config.default_backend
    if chosen is None:
        raise InvalidRequest(
            "no backend: phloem.set_default_backend(phloem.Runtime(model=...)) once, or run(..., backend=...)"
        )
    return as_backend(chosen)


def as_backend(target: Any) -> BaseBackend:
    """The backend of a backend, a Runtime or Engine (``.endpoint``, ``.client``), or a client."""
    if isinstance(target, BaseBackend):
        return target
    for name in ("endpoint", "backend"):
        inner = getattr(target, name, None)
        if isinstance(inner, BaseBackend):
            return inner
    client = target if _is_client(target) else getattr(target, "client", None)
    if client is not None and _is_client(client):
        return PhloemBackend(client)
    if isinstance(target, str) and "://" in target:
        raise Unsupported(
            f"{target!r} is an address and not a backend; write backend=phloem.RuntimeEndpoint({target!r})"
        )
    raise Unsupported(
        f"{target!r} is not a backend; give a phloem.Runtime, a phloem.Engine, phloem.connect(...), or a BaseBackend"
    )


def _is_client(target: Any) -> bool:
    return callable(getattr(target, "submit", None)) and hasattr(target, "welcome")
