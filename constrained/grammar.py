"""A compiled grammar, and the matcher that leads one text through it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .machine import FAR, Endings, Machine, Masks, ShortEnding, pack
from .rests import NOT_KNOWN, Needs
from .spec import GrammarError, GrammarSpec
from .tables import PART_BITS

_MASK_TYPE = np.dtype(np.uint32)
MARGIN = 48  # tokens, and those of the shortest text, that one token may add to what a text needs; see ``Matcher``
MOST_AT_ONCE = 8
_NEVER = 1 << 60


class Step(NamedTuple):
    """Where a token leads: the ``Matcher.state``, its mask, read-only, and the one token that it allows, -1: more."""

    state: int
    mask: np.ndarray
    only_token: int


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar ready to match; shared by all its matchers. ``unchecked`` names what it does not enforce.

    ``needs``: how many tokens a text that has begun may still need.
    """

    spec: GrammarSpec
    machine: Machine
    masks: Masks
    endings: Endings
    start: int
    needs: Needs
    unchecked: tuple[str, ...] = ()

    @property
    def margin(self) -> int:
        """The most tokens that one token is taken to add to what a text needs to end: ``MARGIN`` and those of the
        shortest text, or as many as ``needs`` tells where these are more; where it tells nothing, as many as a first
        token adds. Never more than any text needs."""
        bounds, least = self.needs.bounds, self.least_tokens
        usual = max(MARGIN + (least or 0), bounds.added)
        if bounds is NOT_KNOWN and least is not None:
            first = self.endings.most_after(self.start)
            usual = max(usual, first if first < FAR else 0)
        return usual if bounds.most is None else min(usual, bounds.most)

    @property
    def most_needed(self) -> int | None:
        """The most tokens that a text which has begun may still need to end; None if that is not known."""
        return self.needs.bounds.most

    @property
    def least_tokens(self) -> int | None:
        """The fewest tokens of a text, or a few more; None if no short text was found, so that no text is closed."""
        ending = self.endings.of_start(self.start)
        return None if ending is None else ending.num_tokens

    def matcher(self, *, max_tokens: int | None = None) -> "Matcher":
        """A matcher of a new text, which is complete within ``max_tokens``.

        Raises ValueError if ``max_tokens`` is less than ``least_tokens``.
        """
        matcher = Matcher(self)
        if max_tokens is not None and (least := self.least_tokens) is not None:
            if max_tokens < least:
                raise ValueError(f"max_tokens={max_tokens}: the shortest text of the grammar has {least} tokens")
            matcher.limit_rest(max_tokens)
        return matcher

    def step_at_once(self, state: int, token_id: int) -> Step | None:
        """The step from a ``Matcher.state`` by a token that its mask allows, where that is remembered, or compiled code
        derives it with what is there while nobody holds the machine's lock; else None. For texts without a limit, or
        far from it. It takes some 15 microseconds, and at most a walk over the vocabulary.
        """
        machine, masks = self.machine, self.masks
        if token_id == machine.vocabulary.eos or not machine.lock.acquire(blocking=False):
            return None
        try:
            after = machine.edge(state, token_id)
            if after is None:
                after = machine.derive_quickly(state, token_id)
            if after < 0:
                return None
            mask, only = masks.known.get(after), masks.known_only_token(after)
            if mask is None or only is None:
                mask = masks.at_once(after)
                only = masks.known_only_token(after)
            return None if mask is None or only is None else Step(after, mask, only)
        finally:
            machine.lock.release()

    def after(self, text: bytes) -> "CompiledGrammar":
        """The grammar of ``text`` followed by a text of this one."""
        return replace(self, start=self.machine.start_after(text, self.start)) if text else self


def fill_masks(matchers: Sequence["Matcher"], rows: np.ndarray) -> None:
    """Write the mask of matcher i to row i of ``rows`` (uint32 or int32 [n, ceil(V / 32)])."""
    masks = [matcher.mask() for matcher in matchers]
    if len(rows) != len(masks):
        raise ValueError(f"{len(rows)} rows for {len(masks)} matchers")
    if masks:
        np.stack(masks, out=rows.view(np.uint32))


class Matcher:
    """One text being written. Cheap to clone and to roll back. An error names its place and stays until a rollback.

    With a limit of tokens, masks allow only tokens after which a short ending (``Endings``) still fits. That is looked
    at only where the limit is near: no further away than ``CompiledGrammar.most_needed``, and a token is taken to add
    at most ``CompiledGrammar.margin`` tokens to what the text needs. Where a token far from the limit adds so much more
    that no ending fits, the limit is given up.
    """

    __slots__ = (
        "_closed_from",
        "_configs",
        "_finished",
        "_free_until",
        "_given_up_from",
        "_known",
        "_limit",
        "_machine",
        "_margin",
        "_masks",
        "_num_tokens",
        "_plans",
        "error",
        "grammar",
    )

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.grammar = grammar
        self.error: str | None = None
        self._machine = grammar.machine
        self._masks = grammar.masks
        self._known = grammar.masks.known
        self._num_tokens = len(grammar.machine.vocabulary.tokens)
        self._configs = [grammar.start]
        self._finished = False
        self._limit = self._free_until = _NEVER  # of tokens; of tokens up to which masks are not looked at
        self._margin = 0
        self._closed_from = self._given_up_from = _NEVER  # tokens accepted before the first mask with fewer tokens, ...
        self._plans: dict[int, tuple[int, ...]] = {}  # by the tokens accepted: an ending that has begun

    def limit_rest(self, max_tokens: int) -> None:
        """Limit the rest of the text to ``max_tokens``."""
        self._limit = self.num_tokens + max_tokens
        self._free_until = self._looked_at_from(self.num_tokens)
        self._margin = self.grammar.margin

    def _looked_at_from(self, made: int) -> int:
        """The number of tokens, ``made`` or more, up to which every text that has begun can end within the limit."""
        most = self.grammar.most_needed
        return made if most is None else max(made, self._limit - most)

    @property
    def has_limit(self) -> bool:
        return self._limit < _NEVER

    @property
    def free_until(self) -> int:
        """The number of tokens up to which the limit changes no mask."""
        return self._free_until

    @property
    def is_closed_early(self) -> bool:
        """Whether the limit took tokens out of a mask from which a token was accepted."""
        return self._closed_from < _NEVER

    @property
    def ends_by_limit(self) -> bool:
        """Whether the limit leaves nothing but the end token of a mask that allows more."""
        if self._finished or self.error is not None or len(self._configs) > self._limit or not self.is_short:
            return False
        return self._only_token() == self._machine.vocabulary.eos

    @property
    def num_tokens(self) -> int:
        """Tokens accepted, the end token included."""
        return len(self._configs) - 1 + self._finished

    @property
    def state(self) -> int:
        """Equal states allow the same texts to follow; -1 after the end."""
        return -1 if self._finished else self._configs[-1]

    def fill_mask(self, row: np.ndarray) -> None:
        """Write the mask (uint32 or int32 [ceil(V / 32)]): bit ``t & 31`` of word ``t >> 5`` allows token t.

        The end token's bit is set exactly where the text may end. After the end, or an error, only the end is allowed;
        a grammar found too complex here is such an error.
        """
        config = self._configs[-1]
        known = self._known.young[config >> PART_BITS].get(config)
        if known is None or self._finished or self.error is not None or len(self._configs) > self._free_until:
            known = self.mask()
        if row.dtype != _MASK_TYPE:
            row = row.view(np.uint32)
        row[:] = known

    def mask(self) -> np.ndarray:
        """The mask itself, read-only and shared; see ``fill_mask``."""
        if not self._finished and self.error is None:
            try:
                row = self._masks.of(self._configs[-1])
                return self._closing_mask() if self.is_short else row
            except GrammarError as error:
                self.error = f"at position {self.num_tokens}: {error}"
        return self._only_end()

    def accept(self, token_id: int) -> bool:
        """Take one token; False, with ``error`` set, if the grammar refuses it."""
        configs, machine = self._configs, self._machine
        is_far = len(configs) <= self._free_until
        if is_far and self.error is None and not self._finished and 0 <= token_id < self._num_tokens:
            following = machine.edge(configs[-1], token_id)
            if following is None:
                following = machine.derive_quickly(configs[-1], token_id)
            if following >= 0:
                configs.append(following)
                return True
        if self.error is not None:
            return False
        if self._finished:
            return self._refuse(token_id, "the text has ended")
        vocabulary = machine.vocabulary
        if not 0 <= token_id < self._num_tokens:
            return self._refuse(token_id, f"the vocabulary has {len(vocabulary):,} tokens")
        if token_id == vocabulary.eos:
            if not machine.may_end(configs[-1]):
                return self._refuse(token_id, "the text may not end here")
            if self.is_short and self._limit > self.num_tokens:
                self._closed_from = min(self._closed_from, self.num_tokens)
            self._finished = True
            return True
        try:
            following = machine.advance(configs[-1], token_id)
        except GrammarError as error:
            return self._refuse(token_id, str(error))
        if following < 0:
            return self._refuse(token_id, "the grammar does not allow it")
        if not is_far and self.is_short:
            if not self._closing_mask()[token_id >> 5] >> (token_id & 31) & 1:
                return self._refuse(token_id, f"no ending fits into the {self._limit} tokens after it")
            self._closed_from = min(self._closed_from, self.num_tokens)
            plan = self._plans.get(self.num_tokens)
            if plan is not None and plan[0] == token_id:
                self._plans[self.num_tokens + 1] = plan[1:]
        configs.append(following)
        return True

    # -- near the limit -----------------------------------------------------------------------------------------------

    @property
    def is_short(self) -> bool:
        """Whether the limit takes tokens out of this mask."""
        made = len(self._configs) - 1
        if made < self._free_until or self._finished:
            return False
        left = self._limit - made
        if left <= 0:
            return True
        endings, config = self.grammar.endings, self._configs[-1]
        if made not in self._plans:
            free_until = self._free_after(made, endings.of(config))
            if free_until > made:
                self._free_until = free_until
                if free_until == _NEVER:
                    self._given_up_from = made
                return False
        return endings.most_after(config) >= left

    def _free_after(self, made: int, ending: ShortEnding | None) -> int:
        """The number of tokens up to which the limit takes none out of the masks, told by the ending after ``made``
        tokens; ``made`` itself if this mask has to be looked at."""
        left = self._limit - made
        if ending is None or ending.num_tokens > left:
            return _NEVER
        slack = left - ending.num_tokens - self._margin
        # while a token adds a quarter of the margin on average, there is time until then
        return made + 1 + 4 * slack // (4 + self._margin) if slack > 0 else made

    def _closing_mask(self) -> np.ndarray:
        """The mask where ``is_short``."""
        made = len(self._configs) - 1
        left, config = self._limit - made, self._configs[-1]
        if left <= 0:
            return self._only_end()
        endings = self.grammar.endings
        allowed = endings.costs_after(config) < left
        if not allowed.any():
            ending = endings.of(config)
            if made not in self._plans and ending is not None:
                self._plans[made] = endings.tokens_of(ending)
            allowed[self._plans[made][0]] = True
        return pack(allowed)

    def _only_token(self) -> int:
        """The one token that the mask allows; -1 if there are more."""
        if not self.is_short:
            return self._masks.only_token(self._configs[-1])
        words = np.flatnonzero(row := self._closing_mask())
        word = int(row[words[0]])
        return int(words[0]) * 32 + word.bit_length() - 1 if len(words) == 1 and word & (word - 1) == 0 else -1

    # -- ahead of time ------------------------------------------------------------------------------------------------

    def knows(self, token_ids: Sequence[int]) -> bool:
        """Whether all that ``prepare`` derives is remembered. False near the limit, where nothing tells."""
        return self._is_prepared(token_ids, None)

    def prepare_at_once(self, token_ids: Sequence[int]) -> bool:
        """As ``prepare``, where compiled code does it with what is there and nobody holds the machine's lock; whether
        all of it is remembered now. It takes some 20 microseconds, and at most a walk over the vocabulary for each of
        the tokens and of ``MOST_AT_ONCE`` forced ones.
        """
        lock = self._machine.lock
        if not lock.acquire(blocking=False):
            return False
        try:
            return self._is_prepared(token_ids, self._masks.at_once)
        finally:
            lock.release()

    def _is_prepared(self, token_ids: Sequence[int], derive: Callable[[int], np.ndarray | None] | None) -> bool:
        """``knows``; with ``derive``, which makes masks, after deriving what is missing, as far as that can be."""
        if self._finished or self.error is not None:
            return True
        known, edge, eos = self._known, self._machine.edge, self._machine.vocabulary.eos
        config, made = self._configs[-1], len(self._configs) - 1
        taken, tokens, free_until = 0, [*token_ids], self._free_until
        while True:
            row = known.get(config)
            if row is None and derive is not None and taken <= len(tokens) + MOST_AT_ONCE:
                row = derive(config)
            if row is None:
                return False
            if made >= free_until:
                if derive is not None:
                    self.grammar.endings.knows_at_once(config)
                if not self._is_far(config, made):
                    return False
                free_until = self._free_after(made, self.grammar.endings.known(config))
            if taken < len(tokens):
                token = tokens[taken]
                if not row[token >> 5] >> (token & 31) & 1:
                    return True
            else:
                only = self._masks.known_only_token(config)
                if only is None and derive is not None and derive(config) is not None:
                    only = self._masks.known_only_token(config)
                if only is None or only < 0:
                    return only is not None
                token = only
            if token == eos:
                return True
            following = edge(config, token)
            if following is None and derive is not None:
                following = self._machine.derive_quickly(config, token)
            if following is None or following < 0:
                return False
            config, made, taken = following, made + 1, taken + 1

    def _is_far(self, config: int, made: int) -> bool:
        return self.grammar.endings.knows_no_limit(config, self._limit - made, self._margin)

    def prepare(self, token_ids: Sequence[int]) -> None:
        """Derive what it takes to accept these tokens, up to the first that is not allowed, and those that are then
        forced, with the masks on the way. Afterwards ``accept`` and ``mask`` only look up.

        It may run on another thread, on a clone, which is left where it got to.
        """
        try:
            for token in token_ids:
                row = self.mask()
                if not row[token >> 5] >> (token & 31) & 1 or not self.accept(token):
                    return
                self.must_end()
            for token in self.forced_tokens():
                self.accept(token)
                self.must_end()
            self.mask()
        except GrammarError:
            return  # met again, and at once, where the token is accepted

    # -- more than one token ------------------------------------------------------------------------------------------

    def follow(self, states: Sequence[int]) -> None:
        """Take tokens by the ``state`` after each, as another matcher of the grammar had it."""
        assert self.error is None and not self._finished
        self._configs += states

    def _refuse(self, token_id: int, why: str) -> bool:
        tokens = self._machine.vocabulary.tokens
        shown = repr(tokens[token_id]) if 0 <= token_id < len(tokens) else "out of range"
        self.error = f"token {token_id} ({shown}) refused at position {self.num_tokens}: {why}"
        return False

    def rollback(self, n: int) -> None:
        """Forget the last ``n`` tokens, and an error if there is one."""
        if not 0 <= n <= self.num_tokens:
            raise ValueError(f"cannot roll back {n} tokens: {self.num_tokens} were accepted")
        if n == 0:
            return
        self.error = None
        if self._finished:
            self._finished = False
            n -= 1
        if n:
            del self._configs[-n:]
        made = len(self._configs) - 1
        if self._limit < _NEVER:
            self._free_until = min(self._free_until, self._looked_at_from(made))
            if self._given_up_from <= made:
                self._free_until = _NEVER
            else:
                self._given_up_from = _NEVER
            if self._closed_from >= made:
                self._closed_from = _NEVER
            self._plans = {at: plan for at, plan in self._plans.items() if at <= made}

    def clone(self) -> "Matcher":
        twin = Matcher.__new__(Matcher)
        twin.grammar, twin.error, twin._machine = self.grammar, self.error, self._machine
        twin._masks, twin._known, twin._num_tokens = self._masks, self._known, self._num_tokens
        twin._configs = self._configs.copy()
        twin._finished = self._finished
        twin._limit, twin._free_until, twin._margin = self._limit, self._free_until, self._margin
        twin._closed_from, twin._given_up_from = self._closed_from, self._given_up_from
        twin._plans = self._plans.copy()
        return twin

    def _only_end(self) -> np.ndarray:
        vocabulary = self._machine.vocabulary
        row = np.zeros(vocabulary.num_words, np.uint32)
        row[vocabulary.eos >> 5] = np.uint32(1 << (vocabulary.eos & 31))
        return row

    def forced_tokens(self) -> list[int]:
        """The next tokens, as long as each is the only one allowed; at most 1,024.

        Where several tokens spell the same forced bytes, the choice is left to the model.
        """
        out: list[int] = []
        if self._finished or self.error is not None:
            return out
        eos = self._machine.vocabulary.eos
        try:
            while len(out) < 1024:
                only = self._only_token()
                if only < 0 or only == eos or not self.accept(only):
                    break
                out.append(only)
        finally:
            self.rollback(len(out))
        return out

    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        if self.error is not None:
            return False
        return self._finished or self._machine.may_end(self._configs[-1])

    def must_end(self) -> bool:
        """Whether nothing but the end token may follow, so that the text is complete without it.

        That the limit of tokens is reached does not count.
        """
        if not self.is_accepting():
            return False
        if self._finished:
            return True
        try:
            at_limit = len(self._configs) > self._limit
            only = self._masks.only_token(self._configs[-1]) if at_limit else self._only_token()
            return only == self._machine.vocabulary.eos
        except GrammarError:
            return False  # ``mask`` reports the error

    def is_finished(self) -> bool:
        """Whether the end token has been taken."""
        return self._finished
