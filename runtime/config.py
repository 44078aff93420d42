"""What an engine is started with: resolved once, printed once, passed down. Reads no environment."""

from collections.abc import Callable
from typing import Literal

import msgspec

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is, and how much there is of it
Precision = Literal["auto", "float32", "bfloat16", "int4", "int16", "fp8"]


class EngineConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One engine. Sizes count tokens unless their name says otherwise.

    ``adapters``: low-rank ones by name, each a PEFT folder, which programs choose from. ``weights``: ``random`` ones of
    the model's shape need none of its files but config and tokenizer, and say noise, at the model's speed.
    ``precision``: ``float32`` is the reference; ``auto`` takes the fastest that keeps the file's own weights (4-bit
    tensors stay 4-bit), ``int16`` the same with activations in 16 bits instead of 8, ``fp8`` rounds weights to 8-bit
    floats. ``kv_dtype`` ``fp8`` is for a GPU: twice the slots. ``num_slots``: rows of the KV pool, 0: what fits.
    ``max_step_tokens`` is the token budget of one step, ``prefill_chunk`` the most of it that one sequence's prompt may
    take. ``speculative``: tokens are guessed ahead where that is expected to be faster, at most ``max_draft`` of a
    sequence in a step. ``draft_model``: a smaller model of the same vocabulary that guesses too; ``self:N`` is N of the
    model's own layers, ``eagle:FILE`` a head that ``phloem train-drafter`` has made. ``host_cache_bytes``: memory for
    KV that the pool has no room for; ``disk_cache``: a folder for more of it, which a restart finds again, up to
    ``disk_cache_bytes``. ``cache_format`` is how both keep numbers: ``auto`` as the pool does, ``int8`` and ``fp8`` in
    a quarter to a half of that, no longer exact. ``cache_events_url``: where a PUB socket tells which prefixes the
    cache took in and let go. ``eviction`` says which cached prefix goes first and ``order`` which waiting sequence;
    among the first ``match_window`` of them the one with most tokens in the cache goes first. Tenants share by
    ``tenant_weights``, 1 where none is given. On a GPU, ``cuda_graphs`` runs decode steps as graphs, and ``overlap``
    does a step's work on the host while the device computes the next; neither changes an answer. All that the engine
    takes of its memory is ``gpu_memory_fraction`` of it: slots fill what weights and steps leave. ``grammar_engine``
    compiles grammars: our own engine, or one that is installed as an extra and knows fewer of them.
    """

    model: str
    adapters: dict[str, str] = {}
    weights: Literal["file", "random"] = "file"
    device: str = "cpu"
    precision: Precision = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16", "fp8"] = "auto"
    max_seq_len: int = 0
    num_slots: int = 0
    max_running: int = 64
    max_waiting: int = 4096
    max_step_tokens: int = 512
    prefill_chunk: int = 256
    prefix_cache: bool = True
    host_cache_bytes: int = 0
    disk_cache: str = ""
    disk_cache_bytes: int = 16 << 30
    cache_format: Literal["auto", "int8", "fp8"] = "auto"
    cache_events_url: str = ""
    eviction: Literal["program_aware", "lru", "lfu", "size_aware", "priority"] = "program_aware"
    order: Literal["oldest_program", "first_come", "shortest", "shortest_remaining"] = "oldest_program"
    match_window: int = 1
    tenant_weights: dict[str, float] = {}
    jump_forward: bool = True
    grammar_engine: Literal["phloem", "llguidance", "xgrammar"] = "phloem"
    speculative: Literal["auto", "off"] = "auto"
    max_draft: int = 31
    draft_model: str = ""
    cuda_graphs: Literal["auto", "off"] = "auto"
    overlap: Literal["auto", "off"] = "auto"
    gpu_memory_fraction: float = 0.9
    seed: int = 0
    num_threads: int = 0
    client_timeout_s: float = 30.0
    log_level: str = "warning"
