"""The names that programs written for SGLang import from ``lang.ir``."""

from .expressions import (
    REGEX_BOOL,
    REGEX_FLOAT,
    REGEX_INT,
    REGEX_STR,
    SglArgument,
    SglCommitLazy,
    SglConstantText,
    SglExpr,
    SglExprList,
    SglGen,
    SglImage,
    SglRoleBegin,
    SglRoleEnd,
    SglSelect,
    SglSeparateReasoning,
    SglVariable,
    SglVarScopeBegin,
    SglVarScopeEnd,
    SglVideo,
)
from .function import SglFunction
from .sampling_params import SglSamplingParams

__all__ = [
    "REGEX_BOOL",
    "REGEX_FLOAT",
    "REGEX_INT",
    "REGEX_STR",
    "SglArgument",
    "SglCommitLazy",
    "SglConstantText",
    "SglExpr",
    "SglExprList",
    "SglFunction",
    "SglGen",
    "SglImage",
    "SglRoleBegin",
    "SglRoleEnd",
    "SglSamplingParams",
    "SglSelect",
    "SglSeparateReasoning",
    "SglVarScopeBegin",
    "SglVarScopeEnd",
    "SglVariable",
    "SglVideo",
]
