"""The configuration of an engine: resolved once, printed once, passed down."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from ..cpu_isa import CpuIsa, Isa, IsaError, choose
from ..protocol.errors import InvalidParams

Progress = Callable[[str, int, int], None]  # the activity, the parts done, the parts in total
SPLITS = ("tensor_parallel", "pipeline_parallel", "sequence_parallel")  # numbers of ranks, whose product run one model
Precision = Literal["auto", "float32", "bfloat16", "int4", "int16", "fp8"]

MAX_DRAFT = 31  # draft tokens of one sequence in a step, unless the config says otherwise


class EngineConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One engine. Sizes count tokens unless their name says otherwise.

    ``adapters``: low-rank adapters by name, each a PEFT folder; a program chooses one. ``adapter_folder``: where those
    must be that are loaded later; empty: anywhere, and over HTTP none. ``weights="random"``: weights of
    the model's shape, for measuring speed; only config and tokenizer are read. ``precision``: ``float32`` is the
    reference; ``auto`` is the fastest that keeps the file's own weights (4-bit tensors stay 4-bit), ``int16`` the same
    with activations in 16 bits instead of 8, ``fp8`` rounds weights to 8-bit floats. ``kv_dtype="int8"`` on a
    CPU and ``"fp8"`` on a GPU: nearly twice the slots in the same memory, rounded. ``num_slots``: rows of the KV pool,
    0: as many as fit. ``max_running``: sequences of one step; ``max_step_tokens``: its token budget; ``prefill_chunk``:
    the most of it that one sequence's prompt takes; 0: what suits the device (``sized``). ``speculative="auto"``:
    tokens are drafted where that is expected to be faster, at most ``max_draft`` per sequence and step.
    ``draft_model``: a smaller model of the same vocabulary that drafts too; ``self:N`` is N of the model's own layers,
    with its adapters. ``draft_adapters``: by name of an adapter, the folder of the draft model's own one.
    ``host_cache_bytes``:
    host memory for KV evicted from the pool; ``disk_cache``: a folder for KV that outlives the process, up to
    ``disk_cache_bytes``; ``shared_cache``: a bucket in its place, as ``s3://BUCKET/PREFIX``, up to
    ``shared_cache_bytes``. ``cache_format``: the number format of all of them; ``auto`` is the pool's, ``int8`` and
    ``fp8`` take a quarter to a half of it and are not exact. ``cached_prompts="last"`` keeps the prefix of the
    sequence that ended last and no tree, to compare. ``cache_events_url``: a PUB socket that publishes stored and
    evicted prefixes. ``eviction``: which cached prefix is evicted first. ``order``: which waiting sequence runs
    first; among the first ``match_window`` of them, the one with most cached tokens. ``tenant_weights``: each
    tenant's share, by default 1. On a GPU, ``cuda_graphs`` runs all but large steps as CUDA graphs and ``overlap`` runs
    a step's host work while the device computes the next step; neither changes an answer. ``gpu_memory_fraction``: the
    engine's part of the GPU's memory; slots fill what weights and steps leave. ``grammar_engine``: the compiler of
    grammars; the other two are extras and support fewer grammars.
    ``cpu_isa``: the instruction set of the CPU kernels, ``auto`` the best one; another is for comparisons.
    ``tensor_parallel``: processes that share out every layer of the model (``docs/parallel.md``); one that takes no
    part in a step for ``rank_timeout_s`` is lost, and all of them end. ``pipeline_parallel``: processes, or groups of
    ``tensor_parallel`` processes, that each have some of the layers. ``expert_parallel``: parts of the
    ``tensor_parallel`` processes that each have some of a mixture's experts. ``expert_copies``: so many experts
    of other parts, those that are chosen most, lie in each process too. ``sequence_parallel``: copies of these
    processes that each keep some slots of every sequence; ``num_slots`` counts those of all. ``num_threads`` is that of
    each process. ``nnodes``: machines that have equal parts of these processes; this is number ``node_rank``, and
    ``dist_init_addr`` is host:port of number 0.
    """

    model: str
    adapters: dict[str, str] = {}
    adapter_folder: str = ""
    weights: Literal["file", "random"] = "file"
    device: str = "cpu"
    precision: Precision = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = "auto"
    max_seq_len: int = 0
    num_slots: int = 0
    max_running: int = 0
    max_waiting: int = 4096
    max_step_tokens: int = 0
    prefill_chunk: int = 0
    prefix_cache: bool = True
    cached_prompts: Literal["all", "last"] = "all"
    host_cache_bytes: int = 0
    disk_cache: str = ""
    disk_cache_bytes: int = 16 << 30
    shared_cache: str = ""
    shared_cache_bytes: int = 64 << 30
    cache_format: Literal["auto", "int8", "fp8"] = "auto"
    cache_events_url: str = ""
    eviction: Literal["program_aware", "lru", "lfu", "size_aware", "priority"] = "program_aware"
    order: Literal["oldest_program", "first_come", "random", "shortest", "shortest_remaining"] = "oldest_program"
    match_window: int = 1
    tenant_weights: dict[str, float] = {}
    jump_forward: bool = True
    grammar_engine: Literal["phloem", "llguidance", "xgrammar"] = "phloem"
    speculative: Literal["auto", "off"] = "auto"
    max_draft: int = MAX_DRAFT
    draft_model: str = ""
    draft_adapters: dict[str, str] = {}
    cuda_graphs: Literal["auto", "off"] = "auto"
    overlap: Literal["auto", "off"] = "auto"
    gpu_memory_fraction: float = 0.9
    seed: int = 0
    num_threads: int = 0
    cpu_isa: CpuIsa = "auto"
    repack_cache: bool = True
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    expert_copies: int = 0
    sequence_parallel: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str = ""
    rank_timeout_s: float = 30.0
    client_timeout_s: float = 30.0
    log_level: str = "warning"

    @property
    def num_ranks(self) -> int:
        """The processes that run the model together."""
        return self.tensor_parallel * self.pipeline_parallel * self.sequence_parallel


CPU_SIZES = {"max_running": 64, "max_step_tokens": 512, "prefill_chunk": 256}
GPU_SIZES = {"max_running": 256, "max_step_tokens": 8192, "prefill_chunk": 4096}  # a step of 8,192 tokens takes 20 ms


def sized(config: EngineConfig) -> EngineConfig:
    """``config`` with the sizes of its device's steps where it has 0."""
    sizes = CPU_SIZES if config.device.startswith("cpu") else GPU_SIZES
    return msgspec.structs.replace(config, **{name: getattr(config, name) or size for name, size in sizes.items()})


def choose_cpu_isa(config: EngineConfig) -> Isa:
    """The process's instruction set, as the config names it. Call it before torch is imported.

    Raises InvalidParams where this machine, or this process, cannot use it.
    """
    try:
        return choose(config.cpu_isa)
    except IsaError as error:
        raise InvalidParams(str(error), where="cpu_isa") from None


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of an HTTP connection, in seconds.

    ``headers_s``: from a request's first byte, or the connection's beginning, to the end of its headers. ``body_s``:
    from there to the end of its body. ``idle_s``: from an answer to the next request. ``write_s``: how long a client
    may read nothing of an answer. ``per_address``: connections of one address; 0: any number.
    """

    headers_s: float = 15.0
    body_s: float = 60.0
    idle_s: float = 15.0
    write_s: float = 60.0
    per_address: int = 0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Of the responses that a server keeps for ``previous_response_id``; the oldest are dropped first.

    ``max_count``: 0 keeps none. ``max_bytes`` counts their JSON, conversations and tokens.
    """

    max_count: int = 1000
    max_bytes: int = 64 << 20
    lifetime_s: float = 3600.0
