"""Phloem: a language for programs that call a language model many times, and the runtime made for them.

The names below load on first use (PEP 562), so ``import phloem`` costs nothing and imports no torch.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"

_HOMES: dict[str, str] = {
    "AgentRun": ".lang.tools.agent",
    "AnswerCheck": ".protocol.model_rules",
    "Anthropic": ".lang.backend.anthropic",
    "BaseBackend": ".lang.backend.base_backend",
    "Cancelled": ".protocol.errors",
    "Connection": ".engines",
    "Crusoe": ".lang.backend.litellm",
    "DeadlineExceeded": ".protocol.errors",
    "DependencyFailed": ".protocol.errors",
    "Distribution": ".lang.distribution",
    "Engine": ".engines",
    "EngineLost": ".protocol.errors",
    "InternalError": ".protocol.errors",
    "InvalidGrammar": ".protocol.errors",
    "InvalidParams": ".protocol.errors",
    "InvalidRequest": ".protocol.errors",
    "LimitExceeded": ".protocol.errors",
    "LiteLLM": ".lang.backend.litellm",
    "ModelRule": ".protocol.model_rules",
    "Models": ".lang.models",
    "OpenAI": ".lang.backend.openai",
    "Overloaded": ".protocol.errors",
    "ParseError": ".lang.types",
    "PhloemError": ".protocol.errors",
    "PromptTooLong": ".protocol.errors",
    "Probe": ".protocol.model_rules",
    "ProtocolError": ".protocol.errors",
    "Runtime": ".engines",
    "RuntimeEndpoint": ".lang.backend.runtime_endpoint",
    "ServerArgs": ".runtime.server_args",
    "Tool": ".lang.tools.tool",
    "ToolCall": ".lang.tools.calls",
    "ToolCalls": ".lang.tools.calls",
    "ToolResult": ".lang.tools.calls",
    "TraceError": ".lang.tracer",
    "UnknownModel": ".protocol.errors",
    "Unsupported": ".protocol.errors",
    "VertexAI": ".lang.backend.litellm",
    "When": ".protocol.model_rules",
    "agent": ".lang.tools.agent",
    "assistant": ".lang.api",
    "assistant_begin": ".lang.api",
    "assistant_end": ".lang.api",
    "beam": ".lang.beam",
    "best_of": ".lang.decoders",
    "connect": ".engines",
    "describe_tools": ".lang.gen",
    "distribution": ".lang.select",
    "fit_temperature": ".lang.distribution",
    "flush_cache": ".lang.api",
    "function": ".lang.api",
    "gen": ".lang.gen",
    "gen_int": ".lang.gen",
    "gen_string": ".lang.gen",
    "get_server_info": ".lang.api",
    "global_config": ".lang.global_config",
    "greedy_token_selection": ".lang.choices",
    "image": ".lang.api",
    "run_agent": ".lang.tools.agent",
    "run_agent_async": ".lang.tools.agent",
    "sample": ".lang.decoders",
    "select": ".lang.select",
    "separate_reasoning": ".lang.api",
    "set_default_backend": ".lang.api",
    "system": ".lang.api",
    "system_begin": ".lang.api",
    "system_end": ".lang.api",
    "token_length_normalized": ".lang.choices",
    "tool": ".lang.tools.tool",
    "unconditional_likelihood_normalized": ".lang.choices",
    "user": ".lang.api",
    "user_begin": ".lang.api",
    "user_end": ".lang.api",
    "video": ".lang.api",
    "vote": ".lang.decoders",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> _Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'phloem' has no attribute {name!r}; it has: {', '.join(sorted(_HOMES))}")
    value = getattr(_import_module(home, "phloem"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
