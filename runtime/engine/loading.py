"""From an ``EngineConfig`` to the parts an engine is made of. Starts nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from ... import kernels
from ..config import EngineConfig
from ..memory import KVPool
from ..models import Model, load_model
from ..protocol.errors import InvalidParams
from ..tokenizer import ChatTemplate, Tokenizer, load_chat_template, load_tokenizer
from ..weights import resolve_model

log = logging.getLogger(__name__)

DEFAULT_SLOTS = 32_768  # tokens of KV on a CPU when nothing is said


@dataclass(frozen=True, slots=True)
class EngineParts:
    path: Path
    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate | None
    kv: KVPool
    context_len: int
    num_slots: int


def load_parts(config: EngineConfig) -> EngineParts:
    """Raises UnknownModel, InvalidParams and what a broken file raises, each naming what is wrong."""
    kernels.set_threads(config.num_threads)
    path = resolve_model(config.model)
    tokenizer = load_tokenizer(path)
    template = load_chat_template(path, tokenizer)
    model = load_model(path, config)
    if model.device.type == "cpu":
        kernels.warm_up()
        if not model.needs_torch_threads:
            kernels.set_kernel_threads(config.num_threads)
    longest = model.config.max_positions
    if config.max_seq_len < 0 or config.num_slots < 0:
        raise InvalidParams("max_seq_len and num_slots must be 0 (automatic) or positive")
    context_len = config.max_seq_len or longest
    num_slots = config.num_slots or max(DEFAULT_SLOTS, context_len)
    shape = model.config
    kv = KVPool(
        shape.num_layers, num_slots, shape.num_kv_heads, shape.head_dim, dtype=model.kv_dtype, device=model.device
    )
    log.info("%s: context %d, %d KV slots", path.name, context_len, num_slots)
    return EngineParts(path, model, tokenizer, template, kv, context_len, num_slots)
