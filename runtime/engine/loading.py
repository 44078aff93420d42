"""The parts of an engine, loaded as an ``EngineConfig`` says."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import msgspec

from ... import kernels
from ...processor import num_cores
from ...protocol.errors import InvalidParams, Unsupported
from ...radix_cache import BlockStore, FolderStore, HostTier, StoreTier, Tiers
from ...radix_cache.object_store import open_object_store
from ...radix_cache.sealed import digest
from ..config import MAX_DRAFT, EngineConfig, Progress, choose_cpu_isa
from ..executor import Accelerator
from ..executor.accelerator import accelerator_of
from ..executor.sizing import measured_slots
from ..memory import KVBlocks, KVPool, return_freed_memory
from ..models import Model, load_model
from ..models.loading import device_named
from ..parallel.agreed_slots import agreed_slots
from ..parallel.devices import on_device
from ..parallel.gang import Gang, LocalGang, refuse_combinations
from ..parallel.leader import Leader
from ..parallel.mesh import Mesh
from ..parallel.rank import Shape, WeightBytes, threads_of, weight_bytes
from ..parallel.split import RankSplit
from ..scheduler import SchedulerConfig
from ..speculative import DraftModel, ModelDrafter, automaton, shared_text, without_layers
from ..tokenizer import ModelTemplate, Tokenizer, load_chat_template, load_tokenizer
from ..vision.model import VisionModel, load_vision
from ..weights import open_weights, resolve_model
from ..weights.damage import refuse_damage
from ..weights.digest import weights_digest
from ..weights.gguf_header import read_header
from ..weights.vision_config import has_vision
from .grammars import Grammars

log = logging.getLogger(__name__)

BLOCK_LEN = 64  # tokens of KV that are copied to host memory or disk together
STAGING_BYTES = 256 << 20  # of host memory, where the config has only a disk
DEFAULT_SLOTS = 32_768  # tokens of KV on a CPU, of each sequence-parallel rank, unless the config says how many


@dataclass(frozen=True, slots=True)
class EngineParts:
    path: Path
    model: Model
    tokenizer: Tokenizer
    template: ModelTemplate | None
    kv: KVPool
    context_len: int
    num_slots: int
    scheduling: SchedulerConfig
    tiers: Tiers | None
    drafter: ModelDrafter | None = None
    accelerator: Accelerator | None = None
    ranks: RanksOfModel | None = None
    vision: VisionModel | None = None
    _: KW_ONLY
    grammars: Grammars
    copying: threading.Thread | None  # writes what a later start reads, while the engine works


@dataclass(frozen=True, slots=True)
class RanksOfModel:
    """The other ranks of a split model, and the bytes of its file that each rank has read, rank 0 first."""

    gang: Gang
    leader: Leader
    weights: tuple[WeightBytes, ...]


def load_parts(
    config: EngineConfig,
    *,
    accelerator: Accelerator | None = None,
    progress: Progress | None = None,
    gang: Gang | None = None,
) -> EngineParts:
    """``progress`` is called while kernels are compiled. ``gang``: the other ranks, instead of processes that are
    started where the config asks for them.

    Raises UnknownModel, InvalidParams and the errors of a broken file, each naming what is wrong."""
    check_cached_prompts(config)
    refuse_combinations(config)
    mesh = Mesh.of(config)
    if mesh.size > 1 and has_vision(resolve_model(config.model)):
        raise Unsupported(f"{mesh}: vision models are not split; set it to 1", where=mesh.where)
    if gang is None and mesh.size > 1:
        gang = LocalGang(config)
    with ExitStack() as undo:
        if gang is not None:
            undo.callback(gang.close)
        parts = _load_parts(config, accelerator, progress, gang, undo)
        undo.pop_all()
    return parts


def _load_parts(
    config: EngineConfig,
    accelerator: Accelerator | None,
    progress: Progress | None,
    gang: Gang | None,
    undo: ExitStack,
) -> EngineParts:
    config = on_device(config, 0)
    scheduling = scheduler_config(config)
    isa = choose_cpu_isa(config)
    num_threads = threads_of(config)
    kernels.set_threads(num_threads)
    others = () if config.speculative == "off" else (automaton, shared_text)
    compiling = None
    if device_named(config.device).type == "cpu":
        compiling = kernels.begin_warm_up(*others, cpu_isa=config.cpu_isa, num_threads=num_threads or num_cores())
    if compiling is not None:
        undo.callback(compiling.close)
    path = resolve_model(config.model)
    with refuse_damage(path):
        header = read_header(path) if path.is_file() else None  # held, so that the next three read it once
    tokenizer = load_tokenizer(path)
    grammars = Grammars(tokenizer, engine=config.grammar_engine, cpu_isa=config.cpu_isa)
    undo.callback(grammars.close)
    template = load_chat_template(path, tokenizer)
    split = None if gang is None else RankSplit(gang.group, Mesh.of(config), expert_copies=config.expert_copies)
    if has_vision(path):
        refuse_with_vision(config)
    started, unfinished = time.monotonic(), list[Callable[[], None]]()
    model = load_model(path, config, split=split, later=unfinished.append)
    log.info("%s: weights loaded in %.2f s", path.name, time.monotonic() - started)
    vision = load_image_encoder(path, config, model)
    del header
    if model.device.type == "cpu":
        told = None if progress is None else partial(progress, "compiling kernels, once for this machine")
        kernels.warm_up(told, *others, begun=compiling)
        if compiling is not None:
            compiling.close()
        if not model.needs_torch_threads:
            kernels.set_kernel_threads(num_threads)
    longest = model.config.max_positions
    if config.max_seq_len < 0 or config.num_slots < 0:
        raise InvalidParams("max_seq_len and num_slots must be 0 (automatic) or positive")
    context_len = config.max_seq_len or longest
    drafter = load_drafter(config, model, tokenizer, context_len=context_len)
    return_freed_memory()
    if accelerator is None:
        accelerator = accelerator_of(model.device)
    num_slots = config.num_slots
    if not num_slots and accelerator is None:
        num_slots = max(DEFAULT_SLOTS * config.sequence_parallel, context_len)
    shape = model.config
    spare = 0 if accelerator is None else 1  # the executor owns one slot
    ranks = None
    if gang is not None and split is not None:
        leader = gang.begin(model, Shape(tokenizer.vocab_size, num_slots + spare if num_slots else 0, context_len))
        ranks = RanksOfModel(gang, leader, (weight_bytes(split), *gang.weights))
    if not num_slots and accelerator is not None:
        if ranks is None:
            num_slots = measured_slots(model, accelerator, config, context_len=context_len)
        else:
            num_slots = agreed_slots(model, ranks.gang.group, accelerator, config, context_len=context_len)
    kv = KVPool.for_model(
        shape,
        num_slots=Mesh.of(config).pool_slots(num_slots + spare),
        dtype=model.kv_dtype,
        device=model.device,
        num_layers=len(model.layers),
    )
    log.info("%s: context %d, %d KV slots", path.name, context_len, num_slots)
    log.info("precision %s: %s; keys and values %s", config.precision, model.describe(), model.kv_dtype)
    log.info("CPU kernels of %s (%s)", isa.name, isa.about)
    tiers = make_tiers(config, path, model, kv)
    copying = threading.Thread(target=_finish, args=(unfinished,), name="packed-copy") if unfinished else None
    if copying is not None:
        copying.start()
    if compiling is not None:  # the first start on this machine: what grammars run is not compiled either
        grammars.begin()
    return EngineParts(
        path,
        model,
        tokenizer,
        template,
        kv,
        context_len,
        num_slots,
        scheduling,
        tiers,
        drafter,
        accelerator,
        ranks,
        vision,
        grammars=grammars,
        copying=copying,
    )


def _finish(unfinished: Sequence[Callable[[], None]]) -> None:
    for work in unfinished:
        work()


def refuse_with_vision(config: EngineConfig) -> None:
    """Raises Unsupported for what a vision model is not served with."""
    if config.draft_model:
        raise Unsupported(
            f"draft_model={config.draft_model!r}: it cannot read the images of a vision model; leave it out",
            where="draft_model",
        )
    if config.adapters:
        raise Unsupported(f"adapter {next(iter(config.adapters))!r}: vision models take no adapters", where="adapters")


def load_image_encoder(path: Path, config: EngineConfig, model: Model) -> VisionModel | None:
    """None for a model that takes no images."""
    if not has_vision(path):
        return None
    if config.weights == "random":
        log.warning("weights='random' has no image encoder: this engine takes no images")
        return None
    vision = load_vision(path, config, hidden_size=model.config.hidden_size)
    log.info("image encoder: %d layers, %d bytes of %s", vision.config.num_layers, vision.size_bytes, vision.dtype)
    return vision


def model_digest(parts: EngineParts, config: EngineConfig) -> str:
    """A name for all that cached KV follows from beside the tokens: vocabulary, weights and adapters."""
    digest = blake2b(f"{parts.tokenizer.vocab_hash} {weights_digest(parts.path)}".encode(), digest_size=16)
    for name, folder in sorted(config.adapters.items()):
        digest.update(f" {name} {weights_digest(Path(folder))}".encode())
    return digest.hexdigest()


def load_drafter(config: EngineConfig, model: Model, tokenizer: Tokenizer, *, context_len: int) -> ModelDrafter | None:
    """The drafter that runs a model; None where the config names none."""
    name = config.draft_model
    _check_draft_adapters(config)
    if config.speculative == "off" and config.max_draft != MAX_DRAFT:
        raise InvalidParams(f"max_draft={config.max_draft} limits drafts; it needs speculative=auto", where="max_draft")
    if not name:
        return None
    if config.speculative == "off":
        raise InvalidParams(f"draft_model={name!r} makes drafts; it needs speculative=auto", where="draft_model")
    if name.startswith("self:"):
        count, most = name.removeprefix("self:"), len(model.layers) - 1
        if not count.isdecimal() or not 1 <= int(count) <= most:
            message = f"draft_model={name!r}: self:N takes N of the model's layers, 1 to {most}"
            raise InvalidParams(message, where="draft_model")
        return ModelDrafter(DraftModel(without_layers(model, int(count)), max_len=context_len), source="own_layers")
    path = resolve_model(name)
    other = load_tokenizer(path)
    if other.vocab_hash != tokenizer.vocab_hash:
        raise InvalidParams(
            f"draft_model={name!r} has another vocabulary ({other.vocab_size:,} tokens) than the model it would draft "
            f"for ({tokenizer.vocab_size:,}); take a smaller model of the same family",
            where="draft_model",
        )
    trained = open_weights(path).config.max_positions
    of_draft = {"max_seq_len": min(context_len, trained), "adapters": config.draft_adapters, "draft_adapters": {}}
    draft = load_model(path, msgspec.structs.replace(config, **of_draft))
    guesser = DraftModel(draft, max_len=context_len, num_tokens=tokenizer.vocab_size, adapters=model.adapters)
    return ModelDrafter(guesser, source="draft_model")


def _check_draft_adapters(config: EngineConfig) -> None:
    """Raises InvalidParams where ``draft_adapters`` would have no effect."""
    for name, folder in config.draft_adapters.items():
        problem = ""
        if not config.draft_model:
            problem = "there is no draft model; name one with draft_model"
        elif config.draft_model.startswith("self:"):
            problem = f"draft_model={config.draft_model!r} drafts with the model's own adapters; leave it out"
        elif name not in config.adapters:
            there = f"there are {', '.join(config.adapters)}" if config.adapters else "there are none"
            problem = f"the model has no adapter of that name; {there}"
        if problem:
            raise InvalidParams(f"draft adapter {name!r}={folder!r}: {problem}", where="draft_adapters")


def scheduler_config(config: EngineConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        prefill_chunk=config.prefill_chunk,
        order=config.order,
        match_window=config.match_window,
        tenant_weights=config.tenant_weights,
    )


def check_cached_prompts(config: EngineConfig) -> None:
    """Raises InvalidParams where ``cached_prompts`` leaves another setting without an effect."""
    if config.cached_prompts == "last" and (config.eviction != "program_aware" or not config.prefix_cache):
        given = "prefix_cache=False" if not config.prefix_cache else f"eviction={config.eviction!r}"
        raise InvalidParams(
            f"cached_prompts='last' keeps one prompt, so {given} has no effect; leave one of them out",
            where="cached_prompts",
        )


def make_tiers(config: EngineConfig, path: Path, model: Model, kv: KVPool) -> Tiers | None:
    """Host memory and a store behind the pool; None where the config has neither."""
    if config.host_cache_bytes < 0 or min(config.disk_cache_bytes, config.shared_cache_bytes) < 1:
        text = "host_cache_bytes must be 0 (none) or positive, disk_cache_bytes and shared_cache_bytes positive"
        raise InvalidParams(text)
    given = [name for name in ("host_cache_bytes", "disk_cache", "shared_cache") if getattr(config, name)]
    if not given:
        return None
    if config.disk_cache and config.shared_cache:
        text = f"shared_cache={config.shared_cache!r} and disk_cache={config.disk_cache!r}: an engine has one store"
        raise InvalidParams(f"{text}; leave out one of them", where="shared_cache")
    if config.cached_prompts == "last":
        raise InvalidParams(f"{' and '.join(given)} keep evicted prefixes; they need cached_prompts 'all'")
    if not config.prefix_cache:
        raise InvalidParams(f"{' and '.join(given)} keep cached prefixes; they need prefix_cache")
    if config.kv_dtype == "int8" and config.cache_format != "auto":
        text = f"cache_format={config.cache_format!r}: with kv_dtype 'int8' blocks have 8 bits already; use auto"
        raise InvalidParams(text, where="cache_format")
    blocks = KVBlocks(kv, block_len=BLOCK_LEN, format=config.cache_format)
    host_bytes = config.host_cache_bytes or STAGING_BYTES
    if host_bytes < blocks.size_bytes:
        size = f"{blocks.size_bytes:,} bytes, those of one block of {BLOCK_LEN} tokens"
        raise InvalidParams(f"host_cache_bytes={config.host_cache_bytes:,}: it must be at least {size}")
    tier = None
    if config.disk_cache or config.shared_cache:
        format = kv_format(path, model, blocks, precision=config.precision)
        for name, folder in config.adapters.items():
            format += f" adapter {name} {weights_digest(Path(folder))}"
        max_bytes = config.disk_cache_bytes if config.disk_cache else config.shared_cache_bytes
        tier = StoreTier(open_store(config), format=format, max_bytes=max_bytes)
    return Tiers(save=blocks.save, load=blocks.load, host=HostTier(host_bytes), store=tier, block_len=BLOCK_LEN)


def open_store(config: EngineConfig) -> BlockStore:
    """The folder or the bucket that the config names. Raises InvalidParams where there can be none."""
    if config.disk_cache:
        try:
            return FolderStore(config.disk_cache)
        except OSError as error:
            raise InvalidParams(f"disk_cache={config.disk_cache!r} cannot be used: {error}") from None
    try:
        return open_object_store(config.shared_cache)
    except ImportError:
        text = "it needs the package obstore: pip install 'phloem[s3]'"
    except ValueError as error:
        text = str(error)
    raise InvalidParams(f"shared_cache={config.shared_cache!r}: {text}", where="shared_cache")


def handoff_format(path: Path, model: Model, blocks: KVBlocks, config: EngineConfig, *, adapter: str) -> bytes:
    """A digest of what KV must have in common with this engine's, for another engine to use it. ``adapter``: that of
    its program's adapter, or "".
    """
    text = f"{kv_format(path, model, blocks, precision=config.precision)} from {config.weights} adapter {adapter}"
    return digest(text.encode())


def kv_format(path: Path, model: Model, blocks: KVBlocks, *, precision: str) -> str:
    """What KV in a store must have in common with this engine: weights, precision, shape, number format and code."""
    shape = model.config
    heads = f"layers {shape.num_layers} heads {shape.num_kv_heads} of {shape.head_dim}"
    if shape.latent is not None:
        heads += " latent"
    computed = f"computed as {model.dtype} ({precision}) into {blocks.pool.dtype}"
    kept = f"kept as {blocks.format} by {blocks.block_len}"
    return f"weights {weights_digest(path)} {heads} {computed} {kept} by phloem {version('phloem')}"
