"""Drafts by lookup: what followed the same tokens before, in the sequence itself, in others, or after the same prompt.

Costs a few microseconds and no model. Sequences of other namespaces are never looked at.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..scheduler import Draft
from .acceptance import CLASS_OF, Acceptance
from .automaton import SuffixAutomaton
from .drafter import Price, Proposal, Want
from .shared_text import SharedText

OWN, SHARED, PREFIX, OTHER = 0, 1, 2, 3
SOURCES = ("lookup", "shared", "prefix")
_FACTORS = (1.0, 1.0, 1.0, 0.4)  # OTHER: given that the draft's own token is rejected
_OTHER_DEPTHS, _OTHER_LEN = 6, 4  # depths at which branches start, and their length
_OVERLAP = 6  # tokens before a new part of a text that are shared with it
_MAX_NAMESPACES = 16
_CLASSES = CLASS_OF.tolist()
_MIN_OTHER = 1  # tokens of the match before a branch, at least
_SURE, _LONGEST = 12, 99  # tokens of a match: enough to look no further, and counted at most

Continuation = Callable[[np.ndarray, str, int], np.ndarray]


class LookupDrafter:
    """``continuation(tokens, namespace, limit)``: the tokens that the cache holds after exactly these tokens."""

    source = "lookup"

    def __init__(self, continuation: Continuation, *, min_match: int = 2) -> None:
        self.min_match = min_match
        self.acceptance = Acceptance(_FACTORS, keep=0.995)
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
        others = text.others(found, source, chances)
        text.proposed = (source, matched, found, others)
        others = [other for other in others if other.reached * price.token_s > price.row_s]
        if not others or want.limit <= _OTHER_LEN * len(others):
            return Proposal(Draft(found, source=SOURCES[source]), chances)
        return _tree(found, chances, others, SOURCES[source], want.limit)

    def _longest(self, text: "_Text", want: Want) -> tuple[np.ndarray, int, int]:
        """The draft, its source, and the length of the match that it rests on."""
        if len(text.prefix):
            at = text.prefix_at
            return text.prefix[at : at + want.limit], PREFIX, min(16 + at, _LONGEST)
        own = text.automaton
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
            source, matched, found, others = text.proposed
            text.proposed = None
            n = min(len(found), len(made))
            right = _equal(found, made, n)
            text.acceptance.observe(source, matched, right, min(right + 1, n))
            for other in others:
                if other.depth == right < len(made):
                    hit = int(other.token_ids.item(0) == made.item(right))
                    text.acceptance.observe(OTHER, other.matched, hit, 1)
        if len(text.prefix):
            left = text.prefix[text.prefix_at :]
            n = min(len(left), len(made))
            text.prefix_at += n
            if _equal(left, made, n) < n or n == len(left):
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


@dataclass(frozen=True, slots=True, eq=False)
class _Other:
    """A branch after ``depth`` tokens of the draft. ``chances``: each token's, given the tokens before it."""

    depth: int
    token_ids: np.ndarray
    chances: np.ndarray
    matched: int
    reached: float  # the chance that its first token is accepted


def _tree(found: np.ndarray, chances: np.ndarray, others: list[_Other], source: str, limit: int) -> Proposal:
    """The draft with ``others`` as branches, shortened so that all fit ``limit``."""
    length = limit - sum(len(other.token_ids) for other in others)
    others = [other for other in others if other.depth <= length]
    tokens, parts = [found[:length]], [chances[:length]]
    parents = list(range(-1, len(tokens[0]) - 1))
    for other in others:
        at, count = len(parents), len(other.token_ids)
        parents += [other.depth - 1, *range(at, at + count - 1)]
        tokens.append(other.token_ids)
        parts.append(other.chances)
    draft = Draft(np.concatenate(tokens), np.array(parents, np.int32), source)
    return Proposal(draft, np.concatenate(parts))


class _Text:
    """One sequence's tokens, its acceptance rates, and the draft that is being verified."""

    __slots__ = ("acceptance", "automaton", "namespace", "num_shared", "prefix", "prefix_at", "proposed")

    def __init__(self, namespace: str, wider: Acceptance) -> None:
        self.namespace = namespace
        self.automaton = SuffixAutomaton()
        self.acceptance = Acceptance(_FACTORS, wider=wider, keep=0.95)
        self.num_shared = 0
        self.prefix = np.zeros(0, np.int32)
        self.prefix_at = 0
        self.proposed: tuple[int, int, np.ndarray, list[_Other]] | None = None

    def take(self, want: Want) -> None:
        """Add the tokens that are new since the last call."""
        known, tokens = len(self.automaton), want.tokens
        if want.is_first:
            # Between two generations the program may have rolled text back.
            if known > len(tokens) or not np.array_equal(self.automaton.text, tokens[:known]):
                self.automaton = SuffixAutomaton()
                known = self.num_shared = 0
            self.num_shared = max(self.num_shared, want.num_cached)
        if known < len(tokens):
            self.automaton.extend(tokens[known:])

    def others(self, found: np.ndarray, source: int, chances: np.ndarray) -> list[_Other]:
        """Branches: what followed the same tokens at other places, where it differs from ``found``."""
        own = self.automaton
        if source == OWN:
            places = own.others(min(_OTHER_DEPTHS, len(found)), min_match=_MIN_OTHER).tolist()
        elif own.match_len >= _MIN_OTHER and own.text.item(own.match_end + 1) != found.item(0):
            places = [(0, own.match_end + 1, own.match_len)]
        else:
            return []
        rates, text = self.acceptance.rates, own.text
        others: list[_Other] = []
        reached, reached_depth = 1.0, 0
        for depth, place, match_len in places:
            matched = min(match_len, _LONGEST)
            while reached_depth < depth:
                reached *= chances.item(reached_depth)
                reached_depth += 1
            chance = (1.0 - chances.item(depth)) * rates.item(OTHER, _CLASSES[matched])
            tokens = text[place : place + _OTHER_LEN]
            after = rates[OWN][CLASS_OF[matched + 1 : matched + len(tokens)]]
            others.append(_Other(depth, tokens.copy(), np.concatenate(([chance], after)), matched, reached * chance))
        return others


def _equal(a: np.ndarray, b: np.ndarray, n: int) -> int:
    """The length of the common prefix, at most ``n``."""
    for i in range(n):
        if a.item(i) != b.item(i):
            return i
    return n
