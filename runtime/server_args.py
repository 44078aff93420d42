"""The options of SGLang's server as an ``EngineConfig``; options that have no equivalent are refused."""

from typing import Any

import msgspec

from ..protocol.errors import InvalidParams, Unsupported
from .config import EngineConfig

_RENAMED = {
    "model_path": "model",
    "device": "device",
    "context_length": "max_seq_len",
    "max_total_tokens": "num_slots",
    "max_running_requests": "max_running",
    "max_queued_requests": "max_waiting",
    "max_prefill_tokens": "max_step_tokens",
    "chunked_prefill_size": "prefill_chunk",
    "random_seed": "seed",
    "tp_size": "tensor_parallel",
    "pp_size": "pipeline_parallel",
    "ep_size": "expert_parallel",
    "log_level": "log_level",
}
_PRECISIONS = {"auto": "auto", "float32": "float32", "float": "float32", "bfloat16": "bfloat16"}


class ServerArgs(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """``ServerArgs(model_path=...)``, for ``Runtime(args)`` or ``Engine(args)``. None: the engine's own default."""

    model_path: str
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str | None = None
    context_length: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    max_prefill_tokens: int | None = None
    chunked_prefill_size: int | None = None
    disable_radix_cache: bool = False
    random_seed: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    ep_size: int | None = None
    log_level: str | None = None

    def engine_options(self) -> dict[str, Any]:
        """The same as options of ``EngineConfig``."""
        options: dict[str, Any] = {
            ours: value for theirs, ours in _RENAMED.items() if (value := getattr(self, theirs)) is not None
        }
        for field, name in (("dtype", "precision"), ("kv_cache_dtype", "kv_dtype")):
            value = getattr(self, field)
            if value not in _PRECISIONS:
                raise Unsupported(f"{field}={value!r}: must be {', '.join(_PRECISIONS)}", where=field)
            if value != "auto":
                options[name] = _PRECISIONS[value]
        if self.disable_radix_cache:
            options["prefix_cache"] = False
        return options


_FIELDS = frozenset(ServerArgs.__struct_fields__)


def from_server_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options where ``model_path`` says that they are SGLang's; those of ``EngineConfig`` may stand among them."""
    theirs = {name: value for name, value in options.items() if name in _FIELDS}
    ours = {name: value for name, value in options.items() if name not in _FIELDS}
    if (count := ours.pop("attn_cp_size", 1)) != 1:
        raise Unsupported(
            f"attn_cp_size={count!r}: it divides SGLang's tp_size devices; here ranks that share out a sequence are "
            f"more processes: leave it out, and set sequence_parallel={count!r} and tp_size to a part of its number",
            where="attn_cp_size",
        )
    if (count := ours.pop("dp_size", 1)) != 1:
        raise Unsupported(
            f"dp_size={count!r}: an engine is one replica; leave it out, and give the runtime replicas={count!r}",
            where="dp_size",
        )
    unknown = sorted(set(ours) - set(EngineConfig.__struct_fields__))
    if unknown:
        known = ", ".join(sorted(_FIELDS | set(EngineConfig.__struct_fields__)))
        raise InvalidParams(f"unknown option {unknown[0]!r}; there are: {known}", where=unknown[0])
    try:
        args = msgspec.convert(theirs, ServerArgs)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"server options: {error}") from None
    return {**args.engine_options(), **ours}
