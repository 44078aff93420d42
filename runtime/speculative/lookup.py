"""Drafts by lookup: what followed the same tokens before, in the sequence itself, in others, or after the same prompt.

Costs a few microseconds and no model. Sequences of other namespaces are never looked at.
"""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from ...radix_cache.tree import common_prefix_len
from ..scheduler import Draft
from .acceptance import CLASS_OF, Acceptance
from .automaton import SeenText
from .drafter import Price, Proposal, Want
from .shared_text import SharedText

OWN, SHARED, PREFIX = 0, 1, 2
SOURCES = ("lookup", "shared", "prefix")
_OVERLAP = 6  # tokens before a new part of a text that are shared with it
_MAX_NAMESPACES = 16
_SURE, _LONGEST = 12, 99  # tokens of a match: enough to look no further, and counted at most

Continuation = Callable[[np.ndarray, str, int], np.ndarray]


class LookupDrafter:
    """``continuation(tokens, namespace, limit)``: the tokens that the cache holds after exactly these tokens."""

    source = "lookup"

    def __init__(self, continuation: Continuation, *, min_match: int = 2) -> None:
        self.min_match = min_match
        self.acceptance = Acceptance(len(SOURCES), keep=0.995)
        self._continuation = continuation
        self._texts: dict[int, _Text] = {}
        self._shared: OrderedDict[str, SharedText] = OrderedDict()

    def propose(self, want: Want, price: Price) -> Proposal | None:
        text = self._texts.get(want.seq_id)
        if text is None:
            text = self._texts[want.seq_id] = _Text(want.namespace, self.acceptance)
        text.take(want)
        if want.is_first:
            text.prefix = self._continuation(want.tokens, want.namespace, 256)
            text.prefix_at = 0
        found, source, matched = self._longest(text, want)
        if not len(found):
            text.proposed = None
            return None
        chances = text.acceptance.rates[source][CLASS_OF[matched : matched + len(found)]]
        text.proposed = (source, matched, found)
        return Proposal(Draft(found, SOURCES[source]), chances)

    def _longest(self, text: "_Text", want: Want) -> tuple[np.ndarray, int, int]:
        """The draft, its source, and the length of the match that it rests on."""
        if len(text.prefix):
            at = text.prefix_at
            return text.prefix[at : at + want.limit], PREFIX, min(16 + at, _LONGEST)
        own = text.seen
        matched = own.match_len
        if matched < _SURE:  # a longer match elsewhere would not be better
            shared = self._shared.get(want.namespace)
            if shared is not None:
                found, longer = shared.continuation(want.tokens, want.limit)
                if longer > matched:
                    return found, SHARED, min(longer, _LONGEST)
        if matched < self.min_match:
            return text.prefix, OWN, 0
        return own.continuation(want.limit), OWN, min(matched, _LONGEST)

    def observe(self, seq_id: int, made: np.ndarray) -> None:
        text = self._texts.get(seq_id)
        if text is None:
            return
        if text.proposed is not None:
            source, matched, found = text.proposed
            text.proposed = None
            n = min(len(found), len(made))
            right = common_prefix_len(found[:n], made[:n])
            text.acceptance.observe(source, matched, right, min(right + 1, n))
        if len(text.prefix):
            left = text.prefix[text.prefix_at :]
            n = min(len(left), len(made))
            text.prefix_at += n
            if common_prefix_len(left[:n], made[:n]) < n or n == len(left):
                text.prefix = text.prefix[:0]

    def flush(self) -> None:
        self._shared.clear()
        self._texts.clear()

    def forget(self, seq_id: int) -> None:
        text = self._texts.pop(seq_id, None)
        if text is not None:
            self._share(text)

    def rest(self, seq_id: int) -> None:
        """A generation of the sequence has ended: share its tokens with other sequences."""
        text = self._texts.get(seq_id)
        if text is not None:
            self._share(text)

    def _share(self, text: "_Text") -> None:
        said = text.seen.text
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
    """One sequence's tokens, its acceptance rates, and the draft that is being verified."""

    __slots__ = ("acceptance", "namespace", "num_shared", "prefix", "prefix_at", "proposed", "seen")

    def __init__(self, namespace: str, wider: Acceptance) -> None:
        self.namespace = namespace
        self.seen = SeenText()
        self.acceptance = Acceptance(len(SOURCES), wider=wider, keep=0.95)
        self.num_shared = 0
        self.prefix = np.zeros(0, np.int32)
        self.prefix_at = 0
        self.proposed: tuple[int, int, np.ndarray] | None = None

    def take(self, want: Want) -> None:
        """Add the tokens that are new since the last call."""
        known, tokens = len(self.seen), want.tokens
        if want.is_first:
            # Between two generations the program may have rolled text back.
            if known > len(tokens) or not np.array_equal(self.seen.text, tokens[:known]):
                self.seen = SeenText()
                known = self.num_shared = 0
            self.num_shared = max(self.num_shared, want.num_cached)
        if known < len(tokens):
            self.seen.extend(tokens[known:])
