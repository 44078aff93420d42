"""``function``, the words for roles and images, and the default backend. The words build expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from .backend.base_backend import BaseBackend
from .backend.resolve import as_backend
from .expressions import SglExpr, SglExprList, SglImage, SglRoleBegin, SglRoleEnd, SglSeparateReasoning, SglVideo
from .function import SglFunction
from .global_config import global_config


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: int | None = None) -> SglFunction: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], SglFunction]: ...
def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a Python function whose first argument is ``s``. Used bare or with options.

    ``num_api_spec_tokens``: one call to a completion API generates that many tokens ahead, and later gens are read from
    its text (API speculative execution).
    """
    if func is not None:
        return SglFunction(func, num_api_spec_tokens)
    return lambda func: SglFunction(func, num_api_spec_tokens)


def image(expr: str | bytes) -> SglExpr:
    """An image, by path or as bytes."""
    return SglImage(expr)


def video(path: str, num_frames: int) -> SglExpr:
    """``num_frames`` evenly spread frames of a video file."""
    return SglVideo(path, num_frames)


def _role(role: str, expr: SglExpr | str | None) -> SglExpr:
    begin, end = SglRoleBegin(role), SglRoleEnd(role)
    return SglExprList((begin, end)) if expr is None else begin + expr + end


def system(expr: SglExpr | str | None = None) -> SglExpr:
    """A system message around ``expr``."""
    return _role("system", expr)


def user(expr: SglExpr | str | None = None) -> SglExpr:
    return _role("user", expr)


def assistant(expr: SglExpr | str | None = None) -> SglExpr:
    return _role("assistant", expr)


def system_begin() -> SglExpr:
    return SglRoleBegin("system")


def system_end() -> SglExpr:
    return SglRoleEnd("system")


def user_begin() -> SglExpr:
    return SglRoleBegin("user")


def user_end() -> SglExpr:
    return SglRoleEnd("user")


def assistant_begin() -> SglExpr:
    return SglRoleBegin("assistant")


def assistant_end() -> SglExpr:
    return SglRoleEnd("assistant")


def separate_reasoning(expr: SglExpr, model_type: str = "") -> SglExpr:
    """``s[name]`` is the answer alone, ``s[name + "_reasoning_content"]`` the reasoning before it.

    ``model_type`` names the model family, whose tags delimit the reasoning: a key of ``reasoning.STYLES``.
    """
    return SglSeparateReasoning(expr, model_type)


def set_default_backend(backend: Any) -> None:
    """The backend of programs whose ``run()`` names none: a Runtime, an Engine, a connection or a BaseBackend."""
    global_config.default_backend = None if backend is None else as_backend(backend)


def _given_or_default(backend: Any) -> BaseBackend | None:
    chosen = backend if backend is not None else global_config.default_backend
    return None if chosen is None else as_backend(chosen)


def flush_cache(backend: Any = None) -> bool:
    """Drop every cached prefix that is not in use. False where there is no backend or it has no cache."""
    chosen = _given_or_default(backend)
    return False if chosen is None else chosen.flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    """What the backend reports of itself; None where there is no backend or it reports nothing."""
    chosen = _given_or_default(backend)
    return None if chosen is None else chosen.get_server_info()
