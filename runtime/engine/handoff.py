"""KV that this engine lends to other engines, and KV that it copies from them.

    lender                                            borrower
    Export ──► commit, pin: a Grant                   Import(grant) ──► which blocks are missing?
    Fetch  ──► seal blocks, renew the grant   ◄────── a few at a time (``Pull``), verified
               no fetch for ttl_s: unpinned           ──► slots ──► tree, pinned for ttl_s ──► Imported

Neither side depends on the other: a block that does not come, comes late or does not verify is computed again by the
program that needs it. Both sides hold no more than pins, which end by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from ...protocol.address import ClientKeys
from ...protocol.errors import InvalidRequest, LimitExceeded, Overloaded, PhloemError, Unsupported
from ...protocol.messages import (
    MAX_FETCH_BYTES,
    Answer,
    EndGrant,
    Export,
    Fetch,
    Grant,
    GrantedPrefix,
    Import,
    Imported,
)
from ...radix_cache import Grants, RadixCache, UnknownGrant, block_names, seal
from .generation import Candidate
from .pull import Blocks, Pull

if TYPE_CHECKING:
    from ..memory import KVBlocks
    from ..scheduler import Sequence
    from .program import Program
    from .programs import Programs

log = logging.getLogger(__name__)

MAX_IMPORTS = 16  # at once
MAX_EXPORTS = 1024  # that wait for their program's first tokens
PULL_BYTES = 2 << 20  # of blocks that one step loads for one import; at least one block
CONNECT_S = 2.0  # for a connection, and for each answer


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A prefix of a grant, in this engine's terms."""

    tokens: np.ndarray
    names: list[bytes]


@dataclass(slots=True, eq=False)
class _Copy:
    """An import under way. ``places``: of each block that is to be fetched, its prefix and its number there."""

    client: bytes
    message: Import
    wanted: list[_Wanted]
    places: dict[bytes, tuple[int, int]]
    pull: Pull | None = None
    num_fetched: int = 0


class Handoff:
    """For the engine's thread. ``format_of(adapter)``: a digest of all that the KV of its programs depends on.

    ``refusal``: why this engine lends and copies nothing; "": it does.
    """

    def __init__(
        self,
        programs: Programs,
        blocks: KVBlocks,
        *,
        format_of: Callable[[str], bytes],
        clock: Callable[[], float],
        vocab_size: int,
        refusal: str = "",
    ) -> None:
        self.refusal = refusal
        self.grants = Grants(programs.scheduler.cache, block_len=blocks.block_len, clock=clock)
        self.num_lent = self.num_copied = 0  # blocks
        self._programs = programs
        self._blocks = blocks
        self._format_of = format_of
        self._vocab_size = vocab_size
        self._copies: list[_Copy] = []
        self._lending: list[tuple[bytes, Export]] = []  # exports that wait, by client

    @property
    def coming(self) -> list[Future[Blocks]]:
        """Of the imports under way; each is done when ``advance`` has something to do for it."""
        return [copy.pull.coming for copy in self._copies if copy.pull is not None]

    def receive(self, client: bytes, message: Export | Fetch | EndGrant | Import) -> Answer | None:
        """The answer; None where there is none, or not yet."""
        if isinstance(message, EndGrant):
            self.grants.end(message.grant)
            return None
        try:
            if self.refusal:
                raise Unsupported(f"this engine hands over no KV: {self.refusal}", where="engine")
            match message:
                case Export():
                    if message.when_drawing:
                        self._wait(client, message)
                        return None
                    return Answer(message.id, self._export(client, message))
                case Fetch():
                    return Answer(message.id, self._fetch(message))
                case Import():
                    imported = self._begin(client, message)
                    return None if imported is None else Answer(message.id, imported)
        except PhloemError as error:
            return Answer(message.id, None, error.info())

    @property
    def is_due(self) -> bool:
        """Whether an export waits that can be answered now."""
        return any(self._is_drawing(client, message.program) for client, message in self._lending)

    def advance(self) -> list[tuple[bytes, Answer]]:
        """Load what has come; returns the answers to imports that have ended, and to exports that have waited."""
        ended: list[tuple[bytes, Answer]] = []
        for waiting in self._lending[:]:
            client, message = waiting
            if self._is_drawing(client, message.program):
                self._lending.remove(waiting)
                try:
                    ended.append((client, Answer(message.id, self._export(client, message))))
                except PhloemError as error:
                    ended.append((client, Answer(message.id, None, error.info())))
        for copy in self._copies[:]:
            assert copy.pull is not None
            if not copy.pull.coming.done():
                continue
            try:
                blocks = copy.pull.coming.result()
                why = "" if not blocks else self._load(copy, blocks)
                is_over = not blocks or bool(why)
            except Exception as error:  # of the other engine, or of the line to it
                why, is_over = getattr(error, "message", "") or type(error).__name__, True
            if not is_over:
                copy.pull.go_on()
                continue
            if why:
                log.warning("an import from %s ended early: %s", copy.message.url, why)
            ended.append((copy.client, Answer(copy.message.id, self._end(copy, why))))
        return ended

    def drop_client(self, client: bytes) -> None:
        """End the imports that ``client`` has asked for; what has come stays for its time. Its exports wait no more."""
        self._lending = [waiting for waiting in self._lending if waiting[0] != client]
        for copy in [copy for copy in self._copies if copy.client == client]:
            self._end(copy, "the client has gone")

    def fail_all(self, error: PhloemError) -> list[tuple[bytes, Answer]]:
        """Keep nothing, after a fault."""
        self.grants.end_all()
        asked = [(copy.client, copy.message.id) for copy in self._copies]
        asked += [(client, message.id) for client, message in self._lending]
        ended = [(client, Answer(number, None, error.info())) for client, number in asked]
        self.close()
        return ended

    def close(self) -> None:
        for copy in self._copies:
            if copy.pull is not None:
                copy.pull.close()
        self._copies.clear()
        self._lending.clear()

    # -- lending ------------------------------------------------------------------------------------------------------

    def _wait(self, client: bytes, message: Export) -> None:
        if len(self._lending) >= MAX_EXPORTS:
            raise Overloaded(f"{MAX_EXPORTS:,} exports wait for first tokens, which is the limit", retry_after_s=1.0)
        self._lending.append((client, message))

    def _sequences(self, program: Program) -> list[Sequence]:
        return [seq for seq in self._programs.live.values() if seq.program == program.cache_key]

    def _is_drawing(self, client: bytes, name: str) -> bool:
        """Whether all generations under way have a token of their own, or the program has ended."""
        program = self._programs.by_key.get((client, name))
        if program is None:
            return True
        drawing = _candidates(self._sequences(program))
        return bool(drawing) and all(one.num_generated and one.seq.num_pending <= 1 for one in drawing)

    def _export(self, client: bytes, message: Export) -> Grant:
        program = self._programs.by_key.get((client, message.program))
        if program is None:
            text = f"program {message.program!r} does not run here for this client"
            raise InvalidRequest(f"{text}; it may have ended", where="program")
        adapter = program.settings.adapter
        format = self._format_of(adapter)
        scheduler = self._programs.scheduler
        sequences = self._sequences(program)
        for seq in sequences:
            scheduler.commit_computed(seq)
        generations = {candidate.generation for candidate in _candidates(sequences)}
        id, prefixes = self.grants.extend(
            [seq.tokens.ids for seq in sequences],
            namespace=program.namespace,
            ttl_s=message.ttl_s,
            format=format,
            grant=message.grant,
        )
        return Grant(
            id=id,
            namespace=program.namespace,
            adapter=adapter,
            block_len=self._blocks.block_len,
            block_bytes=self._blocks.size_bytes,
            format=format,
            ttl_s=message.ttl_s,
            prefixes=[GrantedPrefix(one.tokens.astype("<i4").tobytes(), list(one.names)) for one in prefixes],
            drawn={
                generation.op.op: [candidate.output_ids for candidate in generation.candidates]
                for generation in generations
                if not any(candidate.finish_reason for candidate in generation.candidates)
            },
        )

    def _fetch(self, message: Fetch) -> list[bytes]:
        size_bytes = len(message.names) * self._blocks.size_bytes
        if len(message.names) > 1 and size_bytes > MAX_FETCH_BYTES:
            text = f"a fetch of {len(message.names):,} blocks of {self._blocks.size_bytes:,} bytes"
            raise LimitExceeded(f"{text}, but the limit is {MAX_FETCH_BYTES:,} bytes; fetch fewer", where="names")
        try:
            found, format = self.grants.slots_of(message.grant, message.names), self.grants.format_of(message.grant)
        except UnknownGrant:
            text = f"grant {message.grant!r} is not there: it has ended, or nothing was fetched in its time"
            raise InvalidRequest(f"{text}; export the program again", where="grant") from None
        there = [slots for slots in found if slots is not None]
        saved = iter(self._blocks.save(np.stack(there)) if there else ())
        self.num_lent += len(there)
        return [
            b"" if slots is None else seal(next(saved), format=format, name=name)
            for name, slots in zip(message.names, found, strict=True)
        ]

    # -- copying ------------------------------------------------------------------------------------------------------

    @property
    def _cache(self) -> RadixCache:
        return self._programs.scheduler.cache

    def _begin(self, client: bytes, message: Import) -> Imported | None:
        """Begin to copy; or, where nothing is missing, what there is."""
        copy = _Copy(client, message, self._checked(message.grant), {})
        if len(self._copies) >= MAX_IMPORTS:
            raise Overloaded(f"{MAX_IMPORTS} imports are under way, which is the limit", retry_after_s=1.0)
        for i, prefix in enumerate(copy.wanted):
            for number in range(self._num_held(message.grant, prefix), len(prefix.names)):
                copy.places.setdefault(prefix.names[number], (i, number))
        if not copy.places:
            return self._end(copy, "")
        keys = ClientKeys(message.secret_key, message.server_key) if message.server_key else None
        copy.pull = Pull(
            message.url,
            message.grant.id,
            list(copy.places),
            keys=keys,
            format=message.grant.format,
            num_each=max(1, PULL_BYTES // self._blocks.size_bytes),
            timeout_s=CONNECT_S,
        )
        self._copies.append(copy)
        self._keep(copy)
        return None

    def _checked(self, grant: Grant) -> list[_Wanted]:
        """The prefixes of ``grant``. Raises Unsupported where its KV is of no use here, InvalidRequest where names,
        tokens and lengths do not belong together.
        """
        block_len = self._blocks.block_len
        if grant.format != self._format_of(grant.adapter) or grant.block_len != block_len:
            text = "the granted KV is of another model, precision, number format, block length or version of Phloem"
            raise Unsupported(f"{text} than this engine's; start both engines alike", where="grant")
        wanted = []
        for i, prefix in enumerate(grant.prefixes):
            if len(prefix.tokens) != 4 * block_len * len(prefix.names):
                text = f"{len(prefix.tokens):,} bytes of tokens for {len(prefix.names):,} blocks of {block_len} tokens"
                raise InvalidRequest(f"prefix {i} of the grant has {text}", where="grant")
            tokens = np.frombuffer(prefix.tokens, "<i4").astype(np.int32)
            if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
                raise InvalidRequest(f"prefix {i} of the grant has tokens beyond the vocabulary", where="grant")
            if block_names(tokens, namespace=grant.namespace, block_len=block_len) != prefix.names:
                raise InvalidRequest(f"prefix {i} of the grant: its names are not those of its tokens", where="grant")
            wanted.append(_Wanted(tokens, prefix.names))
        return wanted

    def _load(self, copy: _Copy, blocks: Blocks) -> str:
        """Put blocks into the cache; returns why no more can be, or ""."""
        for i, part in groupby(blocks, key=lambda block: copy.places[block[0]][0]):
            why = self._load_prefix(copy, i, list(part))
            if why:
                return why
        return ""

    def _load_prefix(self, copy: _Copy, i: int, blocks: Blocks) -> str:
        block_len, prefix, grant = self._blocks.block_len, copy.wanted[i], copy.message.grant
        for name, block in blocks:
            if len(block) != self._blocks.size_bytes:
                return (
                    f"block {name.hex()} has {len(block):,} bytes, but this engine's have {self._blocks.size_bytes:,}"
                )
        # Another sequence may have computed some of them meanwhile, and more.
        first = copy.places[blocks[0][0]][1]
        held = self._num_held(grant, prefix)
        blocks = blocks[max(held - first, 0) :]
        first = max(held, first)
        if not blocks:
            return ""
        if len(blocks) * block_len > self._programs.scheduler.spare_room:
            return "this engine has no slots left for it"
        is_there = self._cache.insert(
            prefix.tokens[: (first + len(blocks)) * block_len],
            start=first * block_len,
            namespace=grant.namespace,
            load=lambda slots: self._blocks.load(slots.reshape(-1, block_len), [block for _, block in blocks]),
        )
        if not is_there:
            return "earlier blocks of it were evicted, or no slots are left"
        copy.num_fetched += len(blocks)
        self.num_copied += len(blocks)
        self._keep(copy)
        return ""

    def _keep(self, copy: _Copy) -> None:
        """Pin what has come for the time of the import."""
        grant = copy.message.grant
        for i, prefix in enumerate(copy.wanted):
            owner = ("import", grant.id, i)
            self._cache.pin(prefix.tokens, ttl_s=copy.message.ttl_s, owner=owner, namespace=grant.namespace)

    def _end(self, copy: _Copy, why: str) -> Imported:
        self._keep(copy)
        if copy.pull is not None:
            copy.pull.close()
            self._copies.remove(copy)
        held: set[bytes] = set()
        for prefix in copy.wanted:
            held.update(prefix.names[: self._num_held(copy.message.grant, prefix)])
        return Imported(len(held), copy.num_fetched, why)

    def _num_held(self, grant: Grant, prefix: _Wanted) -> int:
        """Blocks of ``prefix``, from its first on, that the cache has."""
        return self._cache.peek(prefix.tokens, namespace=grant.namespace) // self._blocks.block_len


def _candidates(sequences: list[Sequence]) -> list[Candidate]:
    return [seq.tag for seq in sequences if isinstance(seq.tag, Candidate)]
