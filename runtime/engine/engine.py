"""The engine core: ``step(inbox) -> outbox`` over one model, its KV pool, its cache and its programs.

A step takes messages, advances ops, runs one forward of the scheduler's plan (``step_loop``) and returns messages.
Sockets and threads belong to its callers: ``runtime.process`` and ``phloem.Engine``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ... import constrained
from ...cpu_isa import isa
from ...protocol.cache_events import encode_cache_snapshot
from ...protocol.errors import ErrorInfo, InvalidRequest, PhloemError, ProtocolError, Unsupported
from ...protocol.messages import (
    PROTOCOL_VERSION,
    QUERIES,
    Answer,
    Bye,
    Cancel,
    ClientMessage,
    Embed,
    EndGrant,
    Export,
    Fetch,
    Hello,
    Import,
    Limits,
    LoadAdapter,
    Ping,
    Pong,
    ProtocolFault,
    Query,
    RuntimeMessage,
    Submit,
    TemplateInfo,
    UnloadAdapter,
    Welcome,
)
from ...radix_cache import POLICIES, Contents, RadixCache
from ..config import EngineConfig, Progress, sized
from ..executor import Accelerator, Executor
from ..memory import KVBlocks
from ..scheduler import Scheduler
from ..speculative import Drafter, GrammarDrafter, LookupDrafter, Speculation, StepCosts
from ..vision.images import Images
from ..vision.prompt import ImagePrompt
from .adapters import Adapters
from .cache_feed import CacheFeed
from .embedding_ops import EmbeddingOps
from .gen_ops import GenOps
from .handoff import Handoff
from .image_ops import ImageOps
from .interpreter import Interpreter
from .mask_thread import MaskThread
from .programs import Programs
from .report import batch, cache_nodes, cache_tree, metrics
from .score_ops import ScoreOps
from .step_loop import StepLoop

if TYPE_CHECKING:
    from ..memory import KVPool
    from ..models import Model
    from ..parallel.gang import Gang
    from ..tokenizer import ModelTemplate, Tokenizer

log = logging.getLogger(__name__)

BLOCKS_PER_IDLE_STEP = 16  # KV blocks written to the tiers in a step without a forward
FLUSH_S = 4.0  # for KV blocks that are not in the store yet when the engine ends; a server waits five seconds

Outbox = list[tuple[bytes, RuntimeMessage]]
QUIET_S, PAUSE_S = 0.5, 0.05


class EngineCore:
    """Owns the model and everything that runs on it. Not thread-safe: one thread calls ``step``."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        accelerator: Accelerator | None = None,
        progress: Progress | None = None,
        gang: Gang | None = None,
    ) -> None:
        """``accelerator`` replaces the config's device, ``gang`` the processes of a split model; ``progress`` is called
        while the engine loads.
        """
        from .loading import BLOCK_LEN, handoff_format, load_parts, model_digest

        config = sized(config)
        parts = load_parts(config, accelerator=accelerator, progress=progress, gang=gang)
        self.config = config
        self.model: Model = parts.model
        self.tokenizer: Tokenizer = parts.tokenizer
        self.template: ModelTemplate | None = parts.template
        self.kv: KVPool = parts.kv
        self.model_path: Path = parts.path
        self.context_len = parts.context_len
        self.vocab_size = parts.model.config.vocab_size
        self.limits = Limits()
        self.clock = clock
        self.cache_feed: CacheFeed | None = None  # the caller of ``step`` takes the events and publishes them
        self.cache_events_url = ""  # set before the first ``welcome``
        if config.cache_events_url:
            self.cache_feed = CacheFeed(block_len=BLOCK_LEN, model=model_digest(parts, config))
        self.tiers = parts.tiers
        self.when_idle: Callable[[], None] | None = None  # called once, see _may_load_more
        self._busy_s = clock()
        self._is_closed = False
        contents = Contents()
        images: Images | None = None
        if parts.vision is not None:
            images = Images(parts.vision, ImagePrompt.of(parts.vision.config, self.tokenizer), contents)
        self.images = images
        self.cache = RadixCache(
            parts.num_slots,
            policy=POLICIES["lru" if config.cached_prompts == "last" else config.eviction],
            clock=clock,
            reuse=config.prefix_cache,
            kept=config.cached_prompts,
            tiers=parts.tiers,
            on_event=self.cache_feed.note if self.cache_feed is not None else None,
            block_len=BLOCK_LEN,
            contents=contents,
        )
        self.scheduler = Scheduler(parts.scheduling, self.cache, clock=clock)
        self.executor = Executor(
            self.model,
            self.kv,
            max_rows=config.max_running,
            max_len=self.context_len,
            num_tokens=self.tokenizer.vocab_size,
            accelerator=parts.accelerator,
            use_graphs=config.cuda_graphs == "auto",
            split=None if parts.ranks is None else parts.ranks.leader,
            contents=images,
        )
        self.ranks = parts.ranks
        self.grammars = parts.grammars
        self._copying = parts.copying
        masks = MaskThread()
        self._outbox: Outbox = []
        self.adapters = Adapters(
            config.adapters,
            self._put_adapter,
            root=config.adapter_folder,
            refusal="this engine has several ranks; name them at its start (--adapter)" if parts.ranks else "",
            has_disk=bool(config.disk_cache or config.shared_cache),
        )
        speculation = self._speculation(parts.drafter) if config.speculative != "off" else None
        self.programs = Programs(
            self.scheduler,
            self.tokenizer,
            send=self._send,
            context_len=self.context_len,
            adapters=self.adapters,
            clock=clock,
        )
        lent = KVBlocks(self.kv, block_len=BLOCK_LEN)
        format_of = cache(lambda adapter: handoff_format(self.model_path, self.model, lent, config, adapter=adapter))
        self.handoff = Handoff(
            self.programs,
            lent,
            format_of=lambda adapter: format_of(self.adapters.digest_of(adapter)),
            clock=clock,
            vocab_size=self.vocab_size,
            refusal=_no_handoff(config),
        )
        self.generations = GenOps(
            self.programs,
            compile_grammar=self.grammars.compile,
            masks=masks,
            seed=config.seed,
            may_draft=speculation is not None,
            jump_forward=config.jump_forward,
        )
        scorings, embeddings = ScoreOps(self.programs), EmbeddingOps(self.programs)
        self.image_ops = None if images is None else ImageOps(self.programs, images)
        self.interpreter = Interpreter(
            self.programs,
            self.generations,
            scorings,
            embeddings,
            vocab_size=self.vocab_size,
            limits=self.limits,
            max_waiting=config.max_waiting,
            images=self.image_ops,
        )
        self.loop = StepLoop(
            self.programs,
            self.generations,
            scorings,
            embeddings,
            self.executor,
            masks=masks,
            speculation=speculation,
            tiers=self.tiers,
            overlaps=self.executor.accelerator is not None and config.overlap == "auto",
            clock=clock,
        )

    def _speculation(self, trained: Drafter | None) -> Speculation:
        on_cpu = self.model.device.type == "cpu"
        in_tiles = on_cpu and isa().has_tiles
        costs = StepCosts(slope=0.1 if in_tiles else 0.15 if on_cpu else 0.005)
        drafters: list[Drafter] = [
            LookupDrafter(lambda ids, name, limit: self.cache.continuation(ids, namespace=name, limit=limit)),
            GrammarDrafter(),
        ]
        if trained is not None:
            drafters.append(trained)
        return Speculation(drafters, max_draft=self.config.max_draft, costs=costs, in_tiles=in_tiles, clock=self.clock)

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._coming) or self.loop.flight is not None or self.handoff.is_due

    @property
    def _coming(self) -> list[Future[Any]]:
        """What comes from threads: grammars, masks, tokens of long texts, images, and KV of other engines."""
        masks: list[Future[Any]] = [deferred.future for deferred in self.loop.deferred]
        images = [] if self.image_ops is None else self.image_ops.futures
        texts = self.programs.beside.futures
        return [*self.generations.compiling.values(), *masks, *texts, *images, *self.handoff.coming]

    def welcome(self) -> Welcome:
        return Welcome(
            version=PROTOCOL_VERSION,
            model=self.config.model,
            model_path=str(self.model_path),
            context_len=self.context_len,
            vocab_size=self.vocab_size,
            vocab_hash=self.tokenizer.vocab_hash,
            template=self.template.info() if self.template is not None else TemplateInfo(),
            limits=self.limits,
            capabilities=(
                "text",
                *(() if self.images is None else ("image",)),
                *(() if self.handoff.refusal else ("handoff",)),
                *(f"grammar:{kind}" for kind in constrained.GRAMMAR_KINDS),
            ),
            cache_events_url=self.cache_events_url,
            eos_ids=tuple(sorted(self.tokenizer.eos_ids)),
            adapters=self.adapters.names,
            image_token_id=-1 if self.images is None else self.images.placeholder,
            embedding_size=self.model.config.hidden_size,
        )

    def step(self, inbox: list[tuple[bytes, ClientMessage]]) -> Outbox:
        """Take messages, run at most one forward, and return the messages to send."""
        self.loop.masks.begin_step()
        if inbox or self.has_work:
            self._busy_s = self.clock()
        for client, message in inbox:
            self._receive(client, message)
        if self.handoff.is_due:
            self.loop.vectorised.synchronise_all()
        self._outbox += self.handoff.advance()
        interpreter = self.interpreter
        self.programs.check_deadlines()
        interpreter.advance()
        if not self.loop.run():
            self._idle()
        interpreter.advance()
        outbox, self._outbox = self._outbox, []
        return outbox

    def _idle(self) -> None:
        """No forward can run: give the processor to the threads and to reads from a store, or write KV blocks. Once
        nothing has run for QUIET_S, record a tape that later steps need.
        """
        if self.ranks is not None:
            self.ranks.leader.rest()
        if self.when_idle is not None and not self.has_work and self._may_load_more:
            self.when_idle()
            self.when_idle = None
        if coming := self._coming:
            wait(coming, timeout=0.005, return_when="FIRST_COMPLETED")
        elif self.scheduler.num_reading:
            time.sleep(0.0005)  # KV blocks are being read from a store
        elif self.tiers is not None:
            self.tiers.write_behind(BLOCKS_PER_IDLE_STEP)
        if self.loop.counters.steps > 0 and self.clock() - self._busy_s > QUIET_S:
            self.executor.record_ahead()

    @property
    def _may_load_more(self) -> bool:
        """Whether ``when_idle`` delays no first answer, nor what its client asks next. After the first answer no long
        pause is needed, since a busy engine has none.
        """
        return self.clock() - self._busy_s > (PAUSE_S if self.loop.counters.steps > 0 else QUIET_S)

    def drop_client(self, client_id: bytes) -> None:
        """End the programs of a client that has gone, and drop the messages to it."""
        self.programs.drop_client(client_id)
        self.handoff.drop_client(client_id)
        self._outbox = [(client, message) for client, message in self._outbox if client != client_id]

    def fail_all(self, error: PhloemError) -> Outbox:
        """End every program with ``error``, after a fault that may have left the engine's state inconsistent."""
        self.loop.drop()
        for program in list(self.programs.by_key.values()):
            self.programs.end_program(program, error)
        self.scheduler.drop_plan()
        self._outbox += self.handoff.fail_all(error)
        outbox, self._outbox = self._outbox, []
        return outbox

    def close(self) -> None:
        """End the engine's threads and free the memory of its model and KV cache. A second call does nothing.

        The parts of an engine refer to each other, so without this their memory would stay until Python next collects
        cycles, which may be long after.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.grammars.close()
        self.handoff.close()
        self.loop.masks.close()
        self.programs.beside.close()
        if self.image_ops is not None:
            self.image_ops.close()
        if self.tiers is not None:
            if self.tiers.store is not None and not self.scheduler.is_ahead:
                self.tiers.flush(FLUSH_S)
            self.tiers.close(FLUSH_S)
            self.tiers = None
        if self.ranks is not None:
            self.ranks.gang.close()
        if self._copying is not None:
            self._copying.join()
        del self.model, self.kv, self.executor, self.loop, self.handoff
        self.images = None

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send(self, client: bytes, message: RuntimeMessage) -> None:
        self._outbox.append((client, message))

    def _receive(self, client: bytes, message: ClientMessage) -> None:
        match message:
            case Submit():
                self.interpreter.submit(client, message)
            case Cancel():
                self.interpreter.cancel(client, message)
            case Query():
                self._send(client, self._answer(message))
            case Export() | Fetch() | EndGrant() | Import():
                self.loop.vectorised.synchronise_all()
                answer = self.handoff.receive(client, message)
                if answer is not None:
                    self._send(client, answer)
            case LoadAdapter() | UnloadAdapter():
                self._send(client, self._change_adapters(message))
            case Embed(id=number):
                text = f"{self.config.model!r} is a decoder, whose vectors come from programs with the op 'embedding'"
                self._send(client, Answer(number, None, Unsupported(text, where="model").info()))
            case Hello(version=version):
                if version != PROTOCOL_VERSION:
                    text = (
                        f"protocol version {version}, but this engine speaks {PROTOCOL_VERSION}; install equal versions"
                    )
                    self._send(client, ProtocolFault(ProtocolError(text).info()))
                else:
                    self._send(client, self.welcome())
            case Ping():
                self._send(client, Pong())
            case Bye():
                self.drop_client(client)

    def _change_adapters(self, change: LoadAdapter | UnloadAdapter) -> Answer:
        self.loop.vectorised.synchronise_all()
        try:
            if isinstance(change, LoadAdapter):
                if self.images is not None:
                    raise Unsupported(f"adapter {change.name!r}: vision models take no adapters", where="name")
                self.adapters.load(change.name, change.path)
            else:
                self.adapters.unload(change.name)
        except InvalidRequest as error:
            return Answer(change.id, None, error.info())
        log.info("adapters: %s", ", ".join(self.adapters.names) or "none")
        return Answer(change.id, self.adapters.listed())

    def _put_adapter(self, index: int, name: str, path: str) -> None:
        from ..models.adapters import put_adapter

        put_adapter(self.model, index, name, path)

    def _answer(self, query: Query) -> Answer:
        self.loop.vectorised.synchronise_all()
        match query.what:
            case "info":
                return Answer(query.id, self.info())
            case "metrics":
                return Answer(query.id, self.metrics())
            case "batch":
                return Answer(query.id, batch(self.loop))
            case "cache_tree":
                return Answer(query.id, cache_tree(self.cache, self.tokenizer))
            case "cache_nodes":
                return Answer(query.id, cache_nodes(self.cache, self.programs))
            case "cache_blocks" if self.cache_feed is not None:
                return Answer(query.id, encode_cache_snapshot(self.cache_feed.snapshot(self.cache)))
            case "cache_blocks":
                message = "this engine names no cached blocks; start it with --cache-events-url tcp://127.0.0.1:*"
                return Answer(query.id, None, ErrorInfo("Unsupported", message, "what"))
            case "adapters":
                return Answer(query.id, self.adapters.listed())
            case "flush_cache":
                return Answer(query.id, self.flush_cache())
            case other:
                message = f"query {other!r} is not one of: {', '.join(QUERIES)}"
                return Answer(query.id, None, ErrorInfo("InvalidRequest", message, "what"))

    # -- reports and checks -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if a slot is lost, held twice, or leased while no program runs."""
        self.cache.check()
        if not self.has_work and not self.programs.by_key:
            leased = self.cache.num_leased
            assert leased == 0, f"{leased} slots are leased while no program runs"

    def flush_cache(self) -> int:
        """Drop the cached tokens that no program holds, and the texts in which drafts are looked up. Returns the number
        of tokens dropped from the cache.
        """
        if self.loop.speculation is not None:
            self.loop.speculation.flush()
        return self.cache.flush()

    def info(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "model": self.config.model,
            "model_path": str(self.model_path),
            "config": msgspec.to_builtins(self.config),
            "context_len": self.context_len,
            "vocab_size": self.vocab_size,
            "num_layers": config.num_layers,
            "ranks": [] if self.ranks is None else [msgspec.to_builtins(one) for one in self.ranks.weights],
            "expert_copies": None if self.ranks is None else self.ranks.leader.expert_copies(),
            "num_slots": self.cache.num_slots,
            "kv_bytes": self.kv.size_bytes,
            "precision": self.config.precision,
            "products": self.model.describe(),
            "cpu_isa": isa().name,
            "kv_dtype": str(self.kv.dtype).removeprefix("torch."),
            "metrics": self.metrics(),
        }

    def metrics(self) -> dict[str, Any]:
        handoff = {"lent": self.handoff.num_lent, "copied": self.handoff.num_copied}
        return metrics(self.loop) | {"handoff_blocks": handoff}


def _no_handoff(config: EngineConfig) -> str:
    """Why an engine of ``config`` cannot hand over KV; "" where it can."""
    if config.num_ranks > 1:
        return "its KV lies on several ranks"
    return "" if config.prefix_cache and config.cached_prompts == "all" else "it keeps no cached prefixes"
