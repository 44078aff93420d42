"""Which engine has which cached block, learned from the engines' cache events.

Block names follow from the tokens alone (``radix_cache.blocks``), so one name means the same prefix everywhere. A name
is known with three bits for each engine, as one integer:

    name ──► ... | disk host device | disk host device       bits 3 i, 3 i + 1, 3 i + 2: the engine of number i

The index claims a block of an engine only where an event or a snapshot of the engine's present epoch said so. A lost
event is seen as a gap in the numbers: from then until the engine's snapshot has come, claims may be out of date.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ..protocol.cache_events import BlocksStored, CacheEvent, CacheEvents, CacheSnapshot, Tier
from ..protocol.errors import InvalidParams

Applied = Literal["ok", "gap", "restarted"]

TIERS: dict[Tier, int] = {"device": 0, "host": 1, "disk": 2}
MAX_PENDING = 65_536  # names in events that are kept for an engine until its snapshot comes
MAX_RETIRED = 64  # numbers of engines that are gone; then they are swept out of all names
PAST_EPOCHS = 8  # of each engine; frames of these epochs are late
# As Python allocates them: a name, an integer without its digits, a name in an event of its own, an engine's state.
NAME_BYTES, INT_BYTES, PENDING_BYTES, ENGINE_BYTES = 64, 48, 256, 1024


class Match(NamedTuple):
    """The longest prefix that an engine holds: ``tokens`` in all tiers, ``device_tokens`` of them without a load."""

    tokens: int
    device_tokens: int


class Matches(Mapping[str, Match]):
    """By engine, of those with at least one block. ``tokens``: those held and those on the device, [2, engines]; 0 for
    the others.
    """

    __slots__ = ("engines", "tokens")

    def __init__(self, engines: tuple[str, ...], tokens: np.ndarray) -> None:
        self.engines = engines
        self.tokens = tokens

    @classmethod
    def of(cls, matches: Mapping[str, Match]) -> Matches:
        return cls(tuple(matches), np.array([*matches.values()], np.float32).reshape(-1, 2).T)

    def __getitem__(self, engine: str) -> Match:
        try:
            tokens, on_device = self.tokens[:, self.engines.index(engine)].tolist()
        except ValueError:
            raise KeyError(engine) from None
        if not tokens:
            raise KeyError(engine)
        return Match(int(tokens), int(on_device))

    def __iter__(self) -> Iterator[str]:
        return (self.engines[i] for i in np.flatnonzero(self.tokens[0]))

    def __len__(self) -> int:
        return int(np.count_nonzero(self.tokens[0]))


NO_MATCHES = Matches((), np.zeros((2, 0), np.float32))


class CacheIndex:
    """``max_names`` bounds memory: the names used least recently go first, half of them at once at most.

    Not for several threads at once. ``block_len`` and ``model`` are those of the first engine; 0 and "" before.
    """

    def __init__(self, *, max_names: int = 1_000_000) -> None:
        if max_names < 2:
            raise InvalidParams(f"max_names={max_names}: the index needs room for at least 2 names")
        self.max_names = max_names
        self.block_len = 0
        self.model = ""
        # Names that were stored or matched lately, and names that were so before. ``_turn`` drops the older ones.
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._engines: dict[str, _Engine] = {}
        self._by_number: list[str] = []  # "" where nobody has the number
        self._names: tuple[str, ...] = ()  # the same, for ``Matches``
        self._live = 0  # the device bits of the numbers in use
        self._free: list[int] = []  # numbers of which no name has a bit
        self._retired: list[int] = []  # numbers that nobody has, and names may have bits of

    def __len__(self) -> int:
        """The number of names known."""
        return len(self._young) + len(self._old)

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self._engines)

    def seen(self, engine: str) -> tuple[int, int]:
        """The engine's epoch, and the number of its newest event that is known; 0 and -1 before there was one."""
        known = self._engines.get(engine)
        return (0, -1) if known is None else (known.epoch, known.seq)

    def claims(self) -> dict[str, dict[Tier, set[bytes]]]:
        """All blocks that are claimed, by engine and tier. Walks over every name, and counts none as used."""
        found: dict[str, dict[Tier, set[bytes]]] = {}
        for engine, known in self._engines.items():
            found[engine] = {
                tier: {
                    name
                    for table in (self._young, self._old)
                    for name, bits in table.items()
                    if bits >> (3 * known.number + at) & 1
                }
                for tier, at in TIERS.items()
            }
        return found

    @property
    def num_bytes(self) -> int:
        """An upper bound of the memory that the index takes, from the sizes of its tables and its widest integer."""
        widest = INT_BYTES + 3 * len(self._by_number) // 7  # CPython keeps 30 bits in 4 bytes
        tables = self._young.__sizeof__() + self._old.__sizeof__() + len(self) * (NAME_BYTES + widest)
        return tables + sum(ENGINE_BYTES + PENDING_BYTES * known.num_pending for known in self._engines.values())

    # -- learning -----------------------------------------------------------------------------------------------------

    def apply(self, engine: str, events: CacheEvents) -> Applied:
        """One frame of an engine. ``gap`` and ``restarted``: ask the engine for its snapshot.

        The answer stays so until ``restore`` has returned ``ok``. Frames that come late or twice (by epoch and number)
        change nothing. Raises InvalidParams where model or block length differ from those of the other engines.
        """
        known = self._known(engine, events.epoch, events.model, events.block_len)
        if known is None:
            return self._engines[engine].state
        for event in events.events:
            if known.seq < 0:
                known.seq = event.seq - 1
            if event.seq <= known.seq:
                continue
            if event.seq != known.seq + 1 and known.state == "ok":
                known.state, known.base = "gap", known.seq
            known.seq = event.seq
            self._change(known, event)
            if known.state != "ok":
                known.keep(event)
        return known.state

    def restore(self, engine: str, snapshot: CacheSnapshot) -> Applied:
        """Replace all that is known of the engine by its snapshot and the events after it.

        ``gap``: some of those events are not known here; ask again. A snapshot of a past epoch, or one that is older
        than what is known without a gap, changes nothing. Raises as ``apply``.
        """
        known = self._known(engine, snapshot.epoch, snapshot.model, snapshot.block_len)
        if known is None:
            return self._engines[engine].state
        if snapshot.seq <= (known.seq if known.state == "ok" else known.base):
            return known.state
        known.base = snapshot.seq
        self._retire(known)
        known.number = self._take_number(engine)
        for tier in TIERS:
            self._set(known, tier, getattr(snapshot, tier))
        later = [event for event in known.pending if event.seq > snapshot.seq]
        for event in later:
            self._change(known, event)
        first_missing = snapshot.seq + 1
        for event in later:
            first_missing += event.seq == first_missing
        known.state = "ok" if first_missing > known.seq else "gap"
        known.seq = max(known.seq, snapshot.seq)
        known.forget_pending(later if known.state == "gap" else ())
        return known.state

    def remove(self, engine: str) -> None:
        """The engine is gone: forget its blocks and its epochs."""
        known = self._engines.pop(engine, None)
        if known is not None:
            self._retire(known)
        if not self._engines:
            self.block_len, self.model = 0, ""

    # -- asking -------------------------------------------------------------------------------------------------------

    def match(self, names: Sequence[bytes]) -> Matches:
        """For each engine with at least the first block: the prefix of ``names`` that it holds without a hole."""
        held = on_device = self._live  # engines that have all blocks so far
        rows: list[int] = []  # ``held`` and then ``on_device``, each as often as it stayed the same
        num_held: list[int] = []
        num_on_device: list[int] = []
        young, old = self._young, self._old
        for name in names:
            bits = young.get(name, 0)
            if not bits:
                bits = old.pop(name, 0)
                if not bits:
                    break
                young[name] = bits
            here, device = held & (bits | bits >> 1 | bits >> 2), on_device & bits
            if not here:
                break
            if rows and here == held and device == on_device:
                num_held[-2] += 1
                num_on_device[-1] += 1
            else:
                rows += (here, device)
                num_held += (1, 0)
                num_on_device += (0, 1)
            held, on_device = here, device
        if len(young) > self.max_names // 2:
            self._turn()
        if not rows:
            return NO_MATCHES
        size = len(self._by_number)
        raw = b"".join([row.to_bytes(3 * size // 8 + 1, "little") for row in rows])
        is_held = np.unpackbits(np.frombuffer(raw, np.uint8).reshape(len(rows), -1), axis=1, bitorder="little")
        blocks = np.array((num_held, num_on_device), np.float32) @ is_held[:, : 3 * size : 3].astype(np.float32)
        return Matches(self._names, blocks * self.block_len)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _known(self, engine: str, epoch: int, model: str, block_len: int) -> _Engine | None:
        """The engine's state in ``epoch``, begun anew if that is a new one; None if it is a past one."""
        if not self.block_len:
            self.block_len, self.model = block_len, model
        if (block_len, model) != (self.block_len, self.model):
            raise InvalidParams(
                f"engine {engine!r} has blocks of {block_len} tokens of the model {model!r}, but the other engines "
                f"have blocks of {self.block_len} tokens of {self.model!r}; give it a fleet of its own"
            )
        known = self._engines.get(engine)
        if known is None:
            known = self._engines[engine] = _Engine(epoch, self._take_number(engine))
        elif epoch in known.past:
            return None
        elif epoch != known.epoch:
            self._retire(known)
            past = (known.epoch, *known.past)[:PAST_EPOCHS]
            known = self._engines[engine] = _Engine(epoch, self._take_number(engine), past)
        return known

    def _change(self, known: _Engine, event: CacheEvent) -> None:
        if isinstance(event, BlocksStored):
            self._set(known, event.tier, event.names)
        else:
            self._clear(known, event.tier, event.names)

    def _set(self, known: _Engine, tier: Tier, names: Iterable[bytes]) -> None:
        bit = 1 << 3 * known.number + TIERS[tier]
        young, old, limit = self._young, self._old, self.max_names // 2
        for name in names:
            bits = young.get(name, 0) or old.pop(name, 0)
            young[name] = bits | bit
            if len(young) > limit:
                self._turn()
                young, old = self._young, self._old

    def _clear(self, known: _Engine, tier: Tier, names: Iterable[bytes]) -> None:
        bit = 1 << 3 * known.number + TIERS[tier]
        for name in names:
            table = self._young if name in self._young else self._old
            bits = table.get(name, 0)
            if bits & bit:
                if bits == bit:
                    del table[name]
                else:
                    table[name] = bits ^ bit

    def _turn(self) -> None:
        """Forget the names that were neither stored nor matched since the last turn."""
        self._old, self._young = self._young, {}

    def _take_number(self, engine: str) -> int:
        if len(self._retired) > MAX_RETIRED:
            self._sweep()
        if self._free:
            number = self._free.pop()
            self._by_number[number] = engine
        else:
            number = len(self._by_number)
            self._by_number.append(engine)
        self._names = tuple(self._by_number)
        self._live |= 1 << 3 * number
        return number

    def _retire(self, known: _Engine) -> None:
        self._by_number[known.number] = ""
        self._names = tuple(self._by_number)
        self._live &= ~(1 << 3 * known.number)
        self._retired.append(known.number)

    def _sweep(self) -> None:
        """Clear the bits of retired numbers in every name: about 0.2 us a name."""
        gone = sum(7 << 3 * number for number in self._retired)
        for table in (self._young, self._old):
            for name, bits in list(table.items()):
                if bits & gone:
                    if bits & ~gone:
                        table[name] = bits & ~gone
                    else:
                        del table[name]
        self._free, self._retired = self._free + self._retired, []


class _Engine:
    """What is known of an engine in one epoch.

    ``seq``: of the last event. ``base``: while the state is not ok, the last event up to which nothing is missing. Both
    are -1 at first.
    """

    __slots__ = ("base", "epoch", "num_pending", "number", "past", "pending", "seq", "state")

    def __init__(self, epoch: int, number: int, past: tuple[int, ...] = ()) -> None:
        self.epoch = epoch
        self.number = number
        self.past = past
        self.seq = self.base = -1
        self.state: Applied = "restarted"
        self.pending: list[CacheEvent] = []  # events since the gap: those after the snapshot are applied again
        self.num_pending = 0

    def keep(self, event: CacheEvent) -> None:
        self.pending.append(event)
        self.num_pending += len(event.names)
        if self.num_pending > MAX_PENDING:
            self.forget_pending(())  # a snapshot from before this event will leave a gap

    def forget_pending(self, kept: Iterable[CacheEvent]) -> None:
        self.pending = list(kept)
        self.num_pending = sum(len(event.names) for event in self.pending)
