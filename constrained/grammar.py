"""A compiled grammar, and the matcher that leads one text through it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .machine import Machine, Masks
from .spec import GrammarError, GrammarSpec

_MASK_TYPE = np.dtype(np.uint32)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar ready to match; shared by all its matchers. ``unchecked`` names what it does not enforce."""

    spec: GrammarSpec
    machine: Machine
    masks: Masks
    start: int
    unchecked: tuple[str, ...] = ()

    def matcher(self) -> "Matcher":
        return Matcher(self)

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
    """One text being written. Cheap to clone and to roll back. An error names its place and stays until a rollback."""

    __slots__ = ("_configs", "_finished", "_known", "_machine", "_masks", "error", "grammar")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.grammar = grammar
        self.error: str | None = None
        self._machine = grammar.machine
        self._masks = grammar.masks
        self._known = grammar.masks.known
        self._configs = [grammar.start]
        self._finished = False

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
        known = self._known.young.get(self._configs[-1])
        if known is None or self._finished or self.error is not None:
            known = self.mask()
        if row.dtype != _MASK_TYPE:
            row = row.view(np.uint32)
        row[:] = known

    def mask(self) -> np.ndarray:
        """The mask itself, read-only and shared; see ``fill_mask``."""
        if not self._finished and self.error is None:
            try:
                return self._masks.of(self._configs[-1])
            except GrammarError as error:
                self.error = f"at position {self.num_tokens}: {error}"
        return self._only_end()

    def accept(self, token_id: int) -> bool:
        """Take one token; False, with ``error`` set, if the grammar refuses it."""
        if self.error is not None:
            return False
        if self._finished:
            return self._refuse(token_id, "the text has ended")
        vocabulary = self._machine.vocabulary
        if token_id == vocabulary.eos:
            if not self._machine.may_end(self._configs[-1]):
                return self._refuse(token_id, "the text may not end here")
            self._finished = True
            return True
        if not 0 <= token_id < len(vocabulary):
            return self._refuse(token_id, f"the vocabulary has {len(vocabulary):,} tokens")
        try:
            following = self._machine.advance(self._configs[-1], token_id)
        except GrammarError as error:
            return self._refuse(token_id, str(error))
        if following < 0:
            return self._refuse(token_id, "the grammar does not allow it")
        self._configs.append(following)
        return True

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

    def clone(self) -> "Matcher":
        twin = Matcher.__new__(Matcher)
        twin.grammar, twin.error, twin._machine = self.grammar, self.error, self._machine
        twin._masks, twin._known = self._masks, self._known
        twin._configs = self._configs.copy()
        twin._finished = self._finished
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
        config = self._configs[-1]
        eos = self._machine.vocabulary.eos
        while len(out) < 1024:
            only = self._masks.only_token(config)
            if only < 0 or only == eos:
                break
            out.append(only)
            config = self._machine.advance(config, only)
        return out

    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        if self.error is not None:
            return False
        return self._finished or self._machine.may_end(self._configs[-1])

    def must_end(self) -> bool:
        """Whether nothing but the end token may follow, so that the text is complete without it."""
        if not self.is_accepting():
            return False
        if self._finished:
            return True
        try:
            return self._masks.only_token(self._configs[-1]) == self._machine.vocabulary.eos
        except GrammarError:
            return False  # ``mask`` reports the error

    def is_finished(self) -> bool:
        """Whether the end token has been taken."""
        return self._finished
