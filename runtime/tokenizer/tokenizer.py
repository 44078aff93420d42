"""A vocabulary and the rules that turn text into its tokens and back.

``encode(text)`` cannot return a special token, so no user can type one. The engine adds BOS; ``ModelTemplate`` renders
conversations.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import tokenizers

from ...protocol.errors import InvalidRequest, PromptTooLong
from .detokenizer import Detokenizer
from .recent_texts import RecentTexts
from .spelling import SPACE
from .stop_patterns import StopPattern

if TYPE_CHECKING:
    from ...constrained.vocabulary import Vocabulary

LONG_TEXT = 16_000  # characters; a longer text is tokenized on a thread where others would wait for it
_MAX_STOP_PATTERNS = 64


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is not text. ``lstrip``/``rstrip``: it takes the white space on that side with it."""

    text: str
    lstrip: bool = False
    rstrip: bool = False

    def pattern(self) -> str:
        return (r"\s*" if self.lstrip else "") + re.escape(self.text) + (r"\s*" if self.rstrip else "")


@dataclass(frozen=True, slots=True)
class VocabTable:
    """Each id's ``texts``, as the file spells it, and ``token_bytes``, empty for special and unused ids."""

    texts: list[str]
    token_bytes: list[bytes]
    special: dict[int, SpecialToken]
    unused: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The tokens that begin a text, end a text and end a turn. A grammar writes ``eos_id`` at its end.

    ``text_end_id``: the token that embeddings put after a text; None: none.
    """

    eos_ids: frozenset[int]
    eos_id: int
    bos_id: int | None = None
    add_bos: bool = False
    unk_id: int | None = None
    pad_id: int | None = None
    text_end_id: int | None = None


class Tokenizer:
    """Made by ``load_tokenizer``. ``backend`` knows no special tokens; this class finds them.

    ``vocab_hash`` is equal exactly for vocabularies with the same tokens at the same ids.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, table: VocabTable, ids: SpecialIds, *, prefix_space: bool = False
    ) -> None:
        self._backend = backend
        self._table = table
        self._ids = ids
        self._prefix_space = prefix_space
        self._recent = RecentTexts(self._encode_pieces)
        self._stop_patterns: dict[str, StopPattern] = {}
        self._id_of_special = {token.text: token_id for token_id, token in table.special.items()}
        self.token_bytes = table.token_bytes
        self.special_ids = frozenset(table.special) | table.unused

    @property
    def vocab_size(self) -> int:
        return len(self._table.texts)

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._ids.eos_ids

    @property
    def eos_id(self) -> int:
        return self._ids.eos_id

    @property
    def bos_id(self) -> int | None:
        return self._ids.bos_id

    @property
    def add_bos(self) -> bool:
        return self._ids.add_bos

    @property
    def unk_id(self) -> int | None:
        return self._ids.unk_id

    @property
    def text_end_id(self) -> int | None:
        """The token that the model's own tokenizer puts after every text, which embeddings need; None: none."""
        return self._ids.text_end_id

    @property
    def pad_id(self) -> int | None:
        return self._ids.pad_id

    @cached_property
    def vocab_hash(self) -> str:
        special = sorted((token_id, one.text) for token_id, one in self._table.special.items())
        return hashlib.sha256(repr((self.token_bytes, special)).encode()).hexdigest()[:32]

    # -- text to tokens -----------------------------------------------------------------------------------------------

    def check_length(self, num_chars: int, context_len: int) -> None:
        """Raise PromptTooLong for a text of so many characters that it cannot fit, before it is tokenized.

        No token has more bytes than ``max_token_bytes``, and a character has at least one. Only a vocabulary that
        drops or merges characters could fit a longer text; it is refused there as well.
        """
        limit = context_len * self.max_token_bytes
        if num_chars > limit:
            raise PromptTooLong(
                f"{num_chars:,} characters of prompt, but the context is {context_len:,} tokens of at most "
                f"{self.max_token_bytes} characters; give at most {limit:,}, or start with a larger --max-seq-len"
            )

    @cached_property
    def max_token_bytes(self) -> int:
        """Of the longest token."""
        return max(1, max(map(len, self.token_bytes)))

    def encode(self, text: str, *, special: bool = False, at_start: bool = False) -> list[int]:
        """Tokens of ``text``. With ``special``, special tokens spelled in the text become special tokens.

        For a text longer than ``LONG_TEXT`` other threads run meanwhile.

        ``at_start``: nothing but BOS comes before; there SentencePiece vocabularies put a space before the first word.
        """
        if not special:
            return self._encode_plain(text, at_start=at_start)
        ids: list[int] = []
        for part in self.split_special(text):
            ids.extend((part,) if isinstance(part, int) else self._encode_plain(part, at_start=at_start and not ids))
        return ids

    def split_special(self, text: str) -> Iterator[str | int]:
        """The pieces of ``text`` in order: special tokens as ids, and the text between them."""
        if self._special_pattern is None:
            if text:
                yield text
            return
        start = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > start:
                yield text[start : match.start()]
            found = self._id_of_special.get(match[0])
            yield self._id_of_stripped[match[0].strip()] if found is None else found
            start = match.end()
        if start < len(text):
            yield text[start:]

    def _encode_plain(self, text: str, *, at_start: bool) -> list[int]:
        if not text:
            return []
        if at_start and self._prefix_space:
            text = " " + text
        if SPACE in text and self._space_sign_ids:
            first, *others = text.split(SPACE)
            ids = self._recent.encode(first)
            for piece in others:
                ids += [*self._space_sign_ids, *self._recent.encode(piece)]
            return ids
        return self._recent.encode(text)

    def _encode_pieces(self, text: str) -> list[int]:
        try:
            if len(text) > LONG_TEXT:  # a batch releases Python's lock, ``encode`` does not
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
                return encoding.ids
            return self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            at = _lone_surrogate(text)
            if at is None:
                raise
            raise InvalidRequest(
                f"text holds the lone surrogate U+{ord(text[at]):04X} at character {at}, which is not Unicode text; "
                "replace it"
            ) from None

    @cached_property
    def _space_sign_ids(self) -> list[int]:
        """The byte tokens of ``SPACE`` where the vocabulary would read that sign as a space; else empty."""
        if self.decode(self._encode_pieces(SPACE)) == SPACE:
            return []
        id_of = {text: token_id for token_id, text in enumerate(self._table.texts)}
        names = [f"<0x{byte:02X}>" for byte in SPACE.encode()]
        return [id_of[name] for name in names] if all(name in id_of for name in names) else []

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        longest_first = sorted(self._table.special.values(), key=lambda token: (-len(token.text), token.text))
        return re.compile("|".join(token.pattern() for token in longest_first)) if longest_first else None

    @cached_property
    def _id_of_stripped(self) -> dict[str, int]:
        """The id of a special token that was matched together with white space."""
        return {token.text.strip(): token_id for token_id, token in self._table.special.items()}

    # -- tokens to text -----------------------------------------------------------------------------------------------

    def special_text(self, token_id: int) -> str:
        """How a special or unused token is written in templates."""
        return self._table.texts[token_id]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD. Ids beyond the vocabulary read as nothing."""
        pieces = self._pieces(skip_special)
        joined = b"".join([pieces[token_id] for token_id in ids if 0 <= token_id < len(pieces)])
        return joined.decode("utf-8", errors="replace")

    def detokenizer(
        self,
        stop: Sequence[str] = (),
        *,
        stop_regex: Sequence[str] = (),
        skip_special: bool = True,
        num_hidden: int = 0,
    ) -> Detokenizer:
        patterns = [self.stop_pattern(pattern) for pattern in stop_regex]
        return Detokenizer(self._pieces(skip_special), stop, patterns, num_hidden=num_hidden)

    def stop_pattern(self, pattern: str) -> StopPattern:
        """A regular expression that may end a text; ``GrammarError`` where it cannot. Compiled once while in use."""
        found = self._stop_patterns.pop(pattern, None) or StopPattern(pattern)
        self._stop_patterns[pattern] = found
        while len(self._stop_patterns) > _MAX_STOP_PATTERNS:
            del self._stop_patterns[next(iter(self._stop_patterns))]
        return found

    def _pieces(self, skip_special: bool) -> list[bytes]:
        return self.token_bytes if skip_special else self._shown

    @cached_property
    def _shown(self) -> list[bytes]:
        shown = list(self.token_bytes)
        for token_id, token in self._table.special.items():
            shown[token_id] = token.text.encode("utf-8", errors="surrogateescape")
        return shown

    # -- for grammars -------------------------------------------------------------------------------------------------

    def vocabulary(self) -> Vocabulary:
        """What a grammar needs to know: the bytes of each token, and which are never text."""
        from ...constrained.vocabulary import Vocabulary

        return Vocabulary(self.token_bytes, set(self.special_ids), self.eos_id)


def _lone_surrogate(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
