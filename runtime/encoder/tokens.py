"""An encoder's tokens: the folder's tokenizer.json, with its rules for the special tokens around a text."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokenizers import Tokenizer as Backend

from ...protocol.errors import InvalidRequest, LimitExceeded, PromptTooLong, UnknownModel
from .config import EncoderConfig, read_encoder_config

MAX_CHARS = 1_000_000  # of one text, which is tokenized at once


class EncoderTokenizer:
    """Gives the tokens that sentence-transformers gives: a special token's spelling in a text is that token."""

    def __init__(self, backend: Backend, config: EncoderConfig) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._config = config
        self._whole, self._cut = backend, Backend.from_str(backend.to_str())
        self._cut.enable_truncation(config.max_len)
        spelled = sorted(backend.get_vocab(with_added_tokens=True).items())
        self.vocab_hash = hashlib.sha256(repr(spelled).encode()).hexdigest()[:32]

    def encode_pair(
        self, first: str, second: str, *, truncate: bool = True, where: str = "input"
    ) -> tuple[list[int], int]:
        """The tokens of a pair of texts, and how many of them are of the first type. See ``encode``.

        A pair of too many tokens loses tokens of its longer text.
        """
        if max(len(first), len(second)) > MAX_CHARS:
            longest = max(len(first), len(second))
            raise LimitExceeded(f"a text of {longest:,} characters; the limit is {MAX_CHARS:,}, cut it", where=where)
        found = (self._cut if truncate else self._whole).encode(first, second)
        return self.checked(found.ids, where=where), found.type_ids.count(0)

    def encode(self, text: str, *, truncate: bool = True, where: str = "input") -> list[int]:
        """With the special tokens around the text. A text of too many tokens is cut, or refused without ``truncate``.

        Raises PromptTooLong, LimitExceeded for too many characters, InvalidRequest for a text without tokens.
        """
        if len(text) > MAX_CHARS:
            raise LimitExceeded(f"a text of {len(text):,} characters; the limit is {MAX_CHARS:,}, cut it", where=where)
        text = self._config.prompt + text
        if self._config.is_lowered:
            text = text.lower()
        ids: list[int] = (self._cut if truncate else self._whole).encode(text).ids
        return self.checked(ids, where=where)

    def checked(self, ids: list[int], *, where: str = "input") -> list[int]:
        """``ids`` if the model can run them. Raises PromptTooLong and InvalidRequest."""
        config = self._config
        if not ids:
            raise InvalidRequest(f"{where} has no token; give a text or token ids", where=where)
        if len(ids) > config.max_len:
            text = f"{where} has {len(ids):,} tokens, but the model takes {config.max_len:,}"
            raise PromptTooLong(f"{text}; shorten it, or give a text with truncate=true", where=where)
        wrong = next((token for token in ids if not 0 <= token < config.vocab_size), None)
        if wrong is not None:
            text = f"{where} holds token id {wrong}, but the vocabulary has {config.vocab_size:,}"
            raise InvalidRequest(f"{text}; give ids from 0 to {config.vocab_size - 1:,}", where=where)
        return ids


def load_encoder_tokenizer(path: Path, config: EncoderConfig | None = None) -> EncoderTokenizer:
    """Raises UnknownModel where the folder has no tokenizer.json, or one that cannot be read."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise UnknownModel(f"{path} has no tokenizer.json; other forms of a vocabulary are not read, save it as such")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises nothing more exact
        raise UnknownModel(f"{file} cannot be read as a tokenizer: {error}") from error
    return EncoderTokenizer(backend, config or read_encoder_config(path))
