"""The pins that programs have made at the engines of a fleet, so that each can be made again when its engine is lost.

    Pin ends ──► note ──► engine is lost ──► to_restore ──► a program of its own makes it again ──► note
                   └────── its time is over, or an unpin ends ──► forgotten

A pin belongs to its content, as in an engine: making it again renews it, and an unpin ends the pins on its content and
on each beginning of it. Content is compared as texts and token ids. The content of a sequence that was forked, joined
or rolled back, or that pastes or chooses, is known only in its own program.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import msgspec

from ..protocol.errors import EngineLost, Overloaded, PhloemError
from ..protocol.messages import ProgramSettings
from ..protocol.ops import AnyOp, Close, Fork, Gen, Image, Join, Mark, Pin, Ref, Special, Text
from ..protocol.sampling import SamplingParams

logger = logging.getLogger(__name__)

Content = tuple[Hashable, ...]


@dataclass(slots=True, eq=False)
class KeptPin:
    """``ops`` make it, the last of them is the ``Pin``. ``engine`` has it; None: none has."""

    ops: list[AnyOp]
    settings: ProgramSettings
    size_bytes: int
    content: Content
    ends_s: float
    engine: object | None

    @property
    def namespace(self) -> tuple[str, str]:
        return self.settings.cache_salt, self.settings.adapter

    def program(self, *, now_s: float) -> list[AnyOp]:
        """Ops that make it again, for the rest of its time."""
        *before, pin = self.ops
        assert isinstance(pin, Pin)
        sequences = {op.seq: None for op in self.ops}
        for op in self.ops:
            if isinstance(op, Fork):
                sequences.update(dict.fromkeys(op.children))
        open_sequences = sequences.keys() - {op.seq for op in self.ops if isinstance(op, Close)}
        next_op = 1 + max(op.op for op in self.ops)
        # Generated tokens that a replay brings have no KV yet, so the whole prefix is computed before it is pinned.
        compute = Gen(op=next_op, seq=pin.seq, params=SamplingParams(max_tokens=0))
        closes = [Close(op=next_op + 1 + i, seq=seq) for i, seq in enumerate(sorted(open_sequences))]
        return [*before, compute, msgspec.structs.replace(pin, ttl_s=max(self.ends_s - now_s, 0.001)), *closes]


class KeptPins:
    """Of one fleet. The caller locks. Pins of more than ``max_bytes`` together are not kept: least time left first."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pins: list[KeptPin] = []
        self._restoring: dict[str, KeptPin] = {}  # by the program that makes it again

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_bytes(self) -> int:
        return sum(pin.size_bytes for pin in self._pins)

    def note(
        self,
        program: str,
        ops: Sequence[AnyOp],
        settings: ProgramSettings,
        *,
        num_tokens: int,
        size_bytes: int,
        engine: object,
        now_s: float,
    ) -> None:
        """A ``Pin``, the last of ``ops``, has ended at ``engine``, which keeps ``num_tokens`` tokens for it."""
        self.expire(now_s)
        pin = ops[-1]
        assert isinstance(pin, Pin)
        content = _content(program, ops[:-1])
        kept = KeptPin(
            list(ops),
            msgspec.structs.replace(settings, deadline_s=None, trace=False),
            size_bytes,
            content,
            now_s + pin.ttl_s,
            engine,
        )
        self._pins = [other for other in self._pins if not _is_ended_by(kept, other, is_unpin=not pin.ttl_s)]
        if pin.ttl_s and num_tokens:
            self._pins.append(kept)
            self._fit()

    def lose(self, engine: object) -> None:
        """``engine`` is gone, and its pins with it."""
        for pin in self._pins:
            if pin.engine is engine:
                pin.engine = None

    def to_restore(self, now_s: float) -> list[KeptPin]:
        """Pins that no engine has and no program is to make."""
        self.expire(now_s)
        restoring = set(map(id, self._restoring.values()))
        return [pin for pin in self._pins if pin.engine is None and id(pin) not in restoring]

    def begin(self, program: str, pin: KeptPin) -> None:
        """``program`` is to make ``pin`` again."""
        self._restoring[program] = pin

    def is_restoring(self, program: str) -> bool:
        return program in self._restoring

    def restored(self, program: str, engine: object) -> None:
        """``program`` has made its pin again, at ``engine``."""
        self._restoring[program].engine = engine

    def end(self, program: str, error: PhloemError | None) -> None:
        """``program``, which was to make a pin again, is over. Where it has not, another one may, but not after an
        error that stays.
        """
        pin = self._restoring.pop(program)
        if pin.engine is None and error is not None and not isinstance(error, EngineLost | Overloaded):
            logger.warning("a pin could not be made again: %s", error)
            self._pins = [other for other in self._pins if other is not pin]

    def expire(self, now_s: float) -> None:
        self._pins = [pin for pin in self._pins if pin.ends_s > now_s]

    def _fit(self) -> None:
        while self.num_bytes > self._max_bytes:
            first = min(self._pins, key=lambda pin: pin.ends_s)
            self._pins.remove(first)
            logger.warning(
                "pins take more than %d bytes; the one with least time left cannot be restored", self._max_bytes
            )


def ops_of_pin(pin: Pin, before: Sequence[AnyOp]) -> list[AnyOp]:
    """``pin`` and the ops that its sequence needs, of those ``before`` it in its program that have ended well.

    An earlier ``Pin`` becomes a ``Fork`` without children: it also ends the text before it, so tokens stay the same.
    Each image's data are sent once.
    """
    needed = {pin.seq}
    sources = {op.op: op.seq for op in before}
    found: list[AnyOp] = [pin]
    for op in reversed(before):
        children = tuple([child for child in op.children if child in needed]) if isinstance(op, Fork) else ()
        if children:
            needed.add(op.seq)
        if op.seq not in needed:
            continue
        match op:
            case Fork():
                op = msgspec.structs.replace(op, children=children)
            case Pin():
                op = Fork(op=op.op, seq=op.seq, children=())
            case Join():
                needed.update(op.children)
            case Ref():
                needed.add(sources[op.source])
        found.append(op)
    sent: set[str] = set()
    for i in reversed(range(len(found))):
        if isinstance(op := found[i], Image):
            found[i] = msgspec.structs.replace(op, data=b"" if op.hash in sent else op.data)
            sent.add(op.hash)
    return found[::-1]


def _content(program: str, ops: Sequence[AnyOp]) -> Content:
    found: list[Hashable] = []
    for op in ops:
        match op:
            case Text():
                text = found.pop() if found and isinstance(found[-1], str) else ""
                found.append(f"{text}{op.text}")
            case Special():
                found.append(op.ids)
            case Image():
                found.append((op.hash,))
            case Gen() if op.drawn:
                found.append(op.drawn[0].token_ids)
            case Gen() if not op.params.max_tokens:
                pass
            case Mark(begin=None) | Fork(children=()):
                pass
            case _:
                return (program, *ops)
    return tuple(found)


def _is_ended_by(new: KeptPin, other: KeptPin, *, is_unpin: bool) -> bool:
    """Whether ``new`` renews ``other``, or, as an unpin, ends it."""
    if new.namespace != other.namespace:
        return False
    return _begins_with(new.content, other.content) if is_unpin else new.content == other.content


def _begins_with(content: Content, beginning: Content) -> bool:
    if not beginning:
        return True
    count = len(beginning) - 1
    if len(content) <= count or content[:count] != beginning[:count]:
        return False
    ours, theirs = content[count], beginning[count]
    return ours == theirs or (isinstance(ours, str) and isinstance(theirs, str) and ours.startswith(theirs))
