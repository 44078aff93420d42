"""The names that programs written for SGLang import from ``lang.ir``."""

from .expressions import REGEX_BOOL as REGEX_BOOL
from .expressions import REGEX_FLOAT as REGEX_FLOAT
from .expressions import REGEX_INT as REGEX_INT
from .expressions import REGEX_STR as REGEX_STR
from .expressions import SglArgument as SglArgument
from .expressions import SglCommitLazy as SglCommitLazy
from .expressions import SglConstantText as SglConstantText
from .expressions import SglExpr as SglExpr
from .expressions import SglExprList as SglExprList
from .expressions import SglGen as SglGen
from .expressions import SglImage as SglImage
from .expressions import SglRoleBegin as SglRoleBegin
from .expressions import SglRoleEnd as SglRoleEnd
from .expressions import SglSelect as SglSelect
from .expressions import SglSeparateReasoning as SglSeparateReasoning
from .expressions import SglVariable as SglVariable
from .expressions import SglVarScopeBegin as SglVarScopeBegin
from .expressions import SglVarScopeEnd as SglVarScopeEnd
from .expressions import SglVideo as SglVideo
from .function import SglFunction as SglFunction
from .sampling_params import SglSamplingParams as SglSamplingParams
