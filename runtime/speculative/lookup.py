"""Guesses by what followed the same words before: in the sequence itself, in others, or after the very same prefix.

Costs a few microseconds and no model. Never looks across namespaces.
"""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from ..scheduler import Draft
from .acceptance import CLASS_OF, Acceptance
from .automaton import SuffixAutomaton
from .drafter import Proposal, Want
from .shared_text import SharedText

OWN, SHARED, PREFIX = 0, 1, 2
SOURCES = ("lookup", "shared", "prefix")
_OVERLAP = 6  # tokens of context that a new part of a text is shared with
_MAX_NAMESPACES = 16

Continuation = Callable[[np.ndarray, str, int], np.ndarray]


class LookupDrafter:
    """``continuation(tokens, namespace, limit)``: what the cache holds after exactly these tokens."""

    def __init__(self, continuation: Continuation, *, min_match: int = 1) -> None:
        self.min_match = min_match
        self.acceptance = Acceptance(len(SOURCES), keep=0.995)
        self._continuation = continuation
        self._texts: dict[int, _Text] = {}
        self._shared: OrderedDict[str, SharedText] = OrderedDict()

    def propose(self, want: Want) -> Proposal | None:
        text = self._texts.get(want.seq_id)
        if text is None:
            text = self._texts[want.seq_id] = _Text(want.namespace, self.acceptance)
        text.take(want)
        if want.is_first:
            text.prefix = self._continuation(want.tokens, want.namespace, 256)
            text.prefix_at = 0
        best: tuple[float, int, int, np.ndarray] | None = None
        own = text.automaton
        for source, found, matched in (
            (PREFIX, text.prefix[text.prefix_at : text.prefix_at + want.limit], 16 + text.prefix_at),
            (OWN, None, own.match_len),
            (SHARED, None, 0),
        ):
            if source == SHARED and (best is None or CLASS_OF[min(best[2], 99)] <= 3):
                shared = self._shared.get(want.namespace)
                if shared is None:
                    continue
                found, matched = shared.continuation(want.tokens, want.limit)
            elif source == OWN and matched >= self.min_match:
                found = own.continuation(want.limit)
            if found is None or not len(found):
                continue
            rate = float(text.acceptance.rates(source)[CLASS_OF[min(matched, 99)]])
            if best is None or rate > best[0]:
                best = (rate, source, matched, found)
        if best is None:
            text.proposed = None
            return None
        _, source, matched, found = best
        matched = min(matched, 99)
        text.proposed = (source, matched, found)
        chances = text.acceptance.rates(source)[CLASS_OF[matched : matched + len(found)]]
        return Proposal(Draft(found, source=SOURCES[source]), chances)

    def observe(self, seq_id: int, made: np.ndarray) -> None:
        text = self._texts.get(seq_id)
        if text is None:
            return
        if text.proposed is not None:
            source, matched, found = text.proposed
            text.proposed = None
            n = min(len(found), len(made))
            right = _equal(found[:n], made[:n])
            text.acceptance.observe(source, matched, right, min(right + 1, n))
        if len(text.prefix):
            left = text.prefix[text.prefix_at :]
            n = min(len(left), len(made))
            text.prefix_at += n
            if _equal(left[:n], made[:n]) < n or not n:
                text.prefix = text.prefix[:0]

    def forget(self, seq_id: int) -> None:
        text = self._texts.pop(seq_id, None)
        if text is not None:
            self._share(text)

    def rest(self, seq_id: int) -> None:
        """A generation of the sequence is over: others may use what it said."""
        text = self._texts.get(seq_id)
        if text is not None:
            self._share(text)

    def _share(self, text: "_Text") -> None:
        said = text.automaton.text
        if len(said) - text.num_shared < 4:
            return
        shared = self._shared.get(text.namespace)
        if shared is None:
            shared = self._shared[text.namespace] = SharedText()
        self._shared.move_to_end(text.namespace)
        while len(self._shared) > _MAX_NAMESPACES:
            self._shared.popitem(last=False)
        shared.add(said[max(0, text.num_shared - _OVERLAP) :])
        text.num_shared = len(said)


class _Text:
    """One sequence's words, how guesses about it went, and the guess that is being judged."""

    __slots__ = ("acceptance", "automaton", "namespace", "num_shared", "prefix", "prefix_at", "proposed")

    def __init__(self, namespace: str, wider: Acceptance) -> None:
        self.namespace = namespace
        self.automaton = SuffixAutomaton()
        self.acceptance = Acceptance(len(SOURCES), wider=wider, keep=0.9)
        self.num_shared = 0
        self.prefix = np.zeros(0, np.int32)
        self.prefix_at = 0
        self.proposed: tuple[int, int, np.ndarray] | None = None

    def take(self, want: Want) -> None:
        """Read what is new of the sequence."""
        known, tokens = len(self.automaton), want.tokens
        if want.is_first:
            # Between two generations text may have been taken back.
            if known > len(tokens) or not np.array_equal(self.automaton.text, tokens[:known]):
                self.automaton = SuffixAutomaton()
                known = self.num_shared = 0
            self.num_shared = max(self.num_shared, want.num_cached)
        if known < len(tokens):
            self.automaton.extend(tokens[known:])


def _equal(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning of two arrays of one length."""
    differ = np.flatnonzero(a != b)
    return int(differ[0]) if len(differ) else len(a)
