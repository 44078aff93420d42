"""``function``, roles, pictures and the default backend. They build expressions; nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from . import ir
from .backend.base_backend import BaseBackend, as_backend
from .function import SglFunction
from .global_config import global_config

Strings = str | Sequence[str]


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: int | None = None) -> SglFunction: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], SglFunction]: ...
def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a Python function whose first argument is ``s``. Bare, or called with options."""
    if func is not None:
        return SglFunction(func, num_api_spec_tokens)
    return lambda func: SglFunction(func, num_api_spec_tokens)


def image(expr: str | bytes) -> ir.SglExpr:
    """An image, by path or as bytes."""
    return ir.SglImage(expr)


def video(path: str, num_frames: int) -> ir.SglExpr:
    """``num_frames`` evenly spread frames of a video file."""
    return ir.SglVideo(path, num_frames)


def _role(role: str, expr: ir.SglExpr | str | None) -> ir.SglExpr:
    begin, end = ir.SglRoleBegin(role), ir.SglRoleEnd(role)
    return ir.SglExprList((begin, end)) if expr is None else begin + expr + end


def system(expr: ir.SglExpr | str | None = None) -> ir.SglExpr:
    """A system message around ``expr``."""
    return _role("system", expr)


def user(expr: ir.SglExpr | str | None = None) -> ir.SglExpr:
    return _role("user", expr)


def assistant(expr: ir.SglExpr | str | None = None) -> ir.SglExpr:
    return _role("assistant", expr)


def system_begin() -> ir.SglExpr:
    return ir.SglRoleBegin("system")


def system_end() -> ir.SglExpr:
    return ir.SglRoleEnd("system")


def user_begin() -> ir.SglExpr:
    return ir.SglRoleBegin("user")


def user_end() -> ir.SglExpr:
    return ir.SglRoleEnd("user")


def assistant_begin() -> ir.SglExpr:
    return ir.SglRoleBegin("assistant")


def assistant_end() -> ir.SglExpr:
    return ir.SglRoleEnd("assistant")


def separate_reasoning(expr: ir.SglExpr, model_type: str = "") -> ir.SglExpr:
    """``s[name]`` is the answer alone, ``s[name + "_reasoning_content"]`` what was thought before it."""
    return ir.SglSeparateReasoning(expr, model_type)


def set_default_backend(backend: Any) -> None:
    """What programs run on when ``run()`` names no backend: a Runtime, an Engine, a connection, or a BaseBackend."""
    global_config.default_backend = None if backend is None else as_backend(backend)


def _given_or_default(backend: Any) -> BaseBackend | None:
    chosen = backend if backend is not None else global_config.default_backend
    return None if chosen is None else as_backend(chosen)


def flush_cache(backend: Any = None) -> bool:
    """Forget every cached prefix that nobody uses; False where there is no backend."""
    chosen = _given_or_default(backend)
    return False if chosen is None else chosen.flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    chosen = _given_or_default(backend)
    return None if chosen is None else chosen.get_server_info()
