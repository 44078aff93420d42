"""The tokenizer and the chat template inside a GGUF file: byte-level BPE, and SentencePiece BPE with byte fallback."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Backend

from ...protocol.errors import UnknownModel, Unsupported
from ..weights.gguf_header import read_header
from .pretokenizers import pre_tokenizer
from .special_names import HiddenNames, end_of_text_ids, looks_like_control
from .spelling import SPACE, all_byte_level_bytes, is_byte_token, sentencepiece_bytes
from .tokenizer import SpecialIds, SpecialToken, Tokenizer, VocabTable

log = logging.getLogger(__name__)

# The values of tokenizer.ggml.token_type.
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6

MODELS = ("gpt2", "llama")


def gguf_tokenizer(path: Path) -> Tokenizer:
    fields = _Fields(path, read_header(path).metadata)
    model = fields.require("model")
    if model == "gpt2":
        return _byte_level(fields)
    if model == "llama":
        return _sentencepiece(fields)
    raise Unsupported(f"{path}: tokenizer model {model!r} (tokenizer.ggml.model) is not served; served: {MODELS}")


def gguf_template(path: Path) -> str | None:
    template = read_header(path).metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) and template else None


class _Fields:
    """The ``tokenizer.ggml.*`` entries that every kind of vocabulary has."""

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.hidden_names = HiddenNames()
        self.texts: list[str] = self.require("tokens")
        if not isinstance(self.texts, list) or not all(isinstance(text, str) for text in self.texts):
            raise UnknownModel(f"{path}: tokenizer.ggml.tokens is no list of texts; fetch it again")
        types = self.get("token_type")
        self.types = np.ones(len(self.texts), dtype=np.int32) if types is None else np.asarray(types)
        if len(self.types) != len(self.texts):
            raise UnknownModel(f"{path}: {len(self.types):,} token types for {len(self.texts):,} tokens")

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def require(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise UnknownModel(f"{self.path} has no tokenizer.ggml.{name}: the file holds no tokenizer")
        return value

    def token_id(self, name: str) -> int | None:
        value = self.get(f"{name}_token_id")
        if value is None:
            return None
        if not 0 <= int(value) < len(self.texts):
            raise UnknownModel(
                f"{self.path}: tokenizer.ggml.{name}_token_id is {int(value)}, but the vocabulary has "
                f"{len(self.texts):,} tokens"
            )
        return int(value)

    def special(self) -> dict[int, SpecialToken]:
        """Control tokens, and tokens that end turns although the file calls them text."""
        is_special = np.isin(self.types, (UNKNOWN, CONTROL))
        for token_id in np.flatnonzero(self.types == USER_DEFINED):
            is_special[token_id] = looks_like_control(self.texts[token_id])
        for name in ("bos", "eos", "eot", "eom"):
            token_id = self.token_id(name)
            if token_id is not None:
                is_special[token_id] = True
        return {int(i): SpecialToken(self.texts[i]) for i in np.flatnonzero(is_special)}

    def unused(self) -> frozenset[int]:
        return frozenset(np.flatnonzero(self.types == UNUSED).tolist())

    def user_defined(self, special: dict[int, SpecialToken]) -> list[int]:
        return [int(i) for i in np.flatnonzero(self.types == USER_DEFINED) if i not in special]

    def ids(self, special: dict[int, SpecialToken], *, add_bos: bool) -> SpecialIds:
        named = [self.token_id(name) for name in ("eos", "eot", "eom")]
        ends = end_of_text_ids({token.text: i for i, token in special.items()}) | {i for i in named if i is not None}
        if not ends:
            raise UnknownModel(f"{self.path} names no end-of-text token (tokenizer.ggml.eos_token_id)")
        bos = self.token_id("bos")
        return SpecialIds(
            eos_ids=frozenset(ends),
            eos_id=named[0] if named[0] is not None else min(ends),
            bos_id=bos,
            add_bos=bool(self.get("add_bos_token", add_bos)) and bos is not None,
            unk_id=self.token_id("unknown"),
            pad_id=self.token_id("padding"),
            text_end_id=named[0] if self.get("add_eos_token", False) else None,
        )

    def backend_vocab(self, hidden: frozenset[int]) -> dict[str, int]:
        """The names by which the backend finds tokens; of two equal spellings, the first id gets it."""
        vocab: dict[str, int] = {}
        for token_id, text in enumerate(self.texts):
            vocab.setdefault(self.hidden_names[token_id] if token_id in hidden else text, token_id)
        return vocab


def _byte_level(fields: _Fields) -> Tokenizer:
    name = fields.get("pre")
    if name is None:
        log.warning("%s does not name its pre-tokenizer (tokenizer.ggml.pre); taking 'default'", fields.path)
        name = "default"
    pre = pre_tokenizer(name, source=str(fields.path))
    special, unused = fields.special(), fields.unused()
    user_defined = fields.user_defined(special)
    hidden = frozenset(special) | unused
    vocab = fields.backend_vocab(hidden)
    merges = [_merge(fields, line) for line in fields.require("merges")]
    try:
        model = models.BPE(vocab, merges, ignore_merges=pre.ignore_merges)
    except Exception:  # the library has no narrower one for a merge without a token; other faults come again below
        reachable = [pair for pair in merges if pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab]
        if len(reachable) < len(merges) - len(hidden):
            log.warning("%s: %d merges name no token and are left out", fields.path, len(merges) - len(reachable))
        model = models.BPE(vocab, reachable, ignore_merges=pre.ignore_merges)
    backend = Backend(model)
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.build()
    _add_user_defined(backend, fields, user_defined, normalized=False)
    plain = set(user_defined)
    token_bytes = all_byte_level_bytes(fields.texts)
    for i in hidden | plain:
        token_bytes[i] = b"" if i in hidden else fields.texts[i].encode()
    table = VocabTable(fields.texts, token_bytes, special, unused)
    return Tokenizer(backend, table, fields.ids(special, add_bos=pre.add_bos))


def _merge(fields: _Fields, line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not (left and space and right):
        raise UnknownModel(f"{fields.path}: merge {line!r} is not two tokens with a space between")
    return left, right


def _sentencepiece(fields: _Fields) -> Tokenizer:
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        value = fields.get(name)
        if value is not None and np.any(value):
            raise Unsupported(f"{fields.path}: tokenizer.ggml.{name} is not served for SentencePiece vocabularies")
    scores = np.asarray(fields.require("scores"))
    if scores.dtype.kind not in "fiu" or not np.isfinite(scores).all():
        raise UnknownModel(f"{fields.path}: tokenizer.ggml.scores are not all numbers; fetch it again")
    scores = scores.astype(np.float64)
    if len(scores) != len(fields.texts):
        raise UnknownModel(f"{fields.path}: {len(scores):,} scores for {len(fields.texts):,} tokens")
    special, unused = fields.special(), fields.unused()
    user_defined = fields.user_defined(special)
    hidden = frozenset(special) | unused
    vocab = fields.backend_vocab(hidden)
    unk = fields.token_id("unknown")
    is_mergeable = [
        i not in hidden and len(text) > 1 and fields.types[i] not in (BYTE, USER_DEFINED) and not is_byte_token(text)
        for i, text in enumerate(fields.texts)
    ]
    model = models.BPE(
        vocab,
        merges_by_score(fields.texts, scores, is_mergeable, vocab),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unk is None else fields.hidden_names[unk] if unk in hidden else fields.texts[unk],
    )
    backend = Backend(model)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    _add_user_defined(backend, fields, user_defined, normalized=True)
    token_bytes = [b"" if i in hidden else sentencepiece_bytes(text) for i, text in enumerate(fields.texts)]
    table = VocabTable(fields.texts, token_bytes, special, unused)
    prefix_space = bool(fields.get("add_space_prefix", True))
    return Tokenizer(backend, table, fields.ids(special, add_bos=True), prefix_space=prefix_space)


def merges_by_score(
    texts: list[str], scores: np.ndarray, is_mergeable: list[bool], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece's BPE as merges, best first: it joins the two neighbours whose joined piece has the best score.

    Each way to cut a piece into two pieces of the vocabulary is one merge, with that piece's rank.
    """
    merges = []
    order = np.argsort(-scores, kind="stable")
    for token_id in order.tolist():
        if is_mergeable[token_id]:
            text = texts[token_id]
            cuts = [(text[:k], text[k:]) for k in range(1, len(text)) if text[:k] in vocab and text[k:] in vocab]
            merges.extend(sorted(cuts, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])))
    return merges


def _add_user_defined(backend: Backend, fields: _Fields, ids: list[int], *, normalized: bool) -> None:
    """``normalized``: the tokens are spelled like normalised text, with ``▁`` for a space."""
    backend.add_tokens([AddedToken(fields.texts[i], normalized=normalized, special=False) for i in ids])
