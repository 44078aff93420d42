"""Grammars compiled by llguidance or xgrammar, if installed, with the interfaces of our own.

They take fewer kinds of grammars; the others are refused by name. Masks, acceptance and rollback work as with our own
grammars. No token is forced, and text given back for healing must be spelled again as it was.
"""

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from .spec import GrammarError, GrammarSpec
from .vocabulary import Vocabulary

PEERS = ("llguidance", "xgrammar")


def load_peer(name: str, vocabulary: Vocabulary) -> "Peer":
    """The engine called ``name``. Raises GrammarError, with the way to install it, if it is missing."""
    if name not in PEERS:
        raise GrammarError(f"grammar engine {name!r} is not one of: phloem, {', '.join(PEERS)}")
    try:
        module = importlib.import_module(name)
        return Guidance(module, vocabulary) if name == "llguidance" else XGrammar(module, vocabulary)
    except ImportError as error:
        raise GrammarError(
            f"grammar engine {name!r} is not installed ({error}); pip install 'phloem[{name}]', or use phloem's own"
        ) from None


@dataclass(frozen=True, slots=True, eq=False)
class PeerGrammar:
    """A ``CompiledGrammar`` of a peer; ``prefix`` is text that must be written before the grammar begins."""

    spec: GrammarSpec
    peer: "Peer"
    vocabulary: Vocabulary
    compiled: Any
    prefix: bytes = b""
    unchecked: tuple[str, ...] = ()
    least_tokens: None = None  # peers do not say how a text ends, so their texts are cut, not closed

    def matcher(self) -> "PeerMatcher":
        return PeerMatcher(self)

    def after(self, text: bytes) -> "PeerGrammar":
        return replace(self, prefix=text + self.prefix)


def compile_with(peer: "Peer", spec: GrammarSpec, vocabulary: Vocabulary) -> PeerGrammar:
    """Raises GrammarError."""
    for name in spec.options:
        if name != "whitespace" or spec.kind not in ("json", "json_schema"):
            raise GrammarError(f"option {name!r} is not known to grammar engine {peer.name!r}")
    white_space = spec.options.get("whitespace", "flexible")
    if white_space not in ("flexible", "compact"):
        raise GrammarError(
            f"option whitespace is {white_space!r}; grammar engine {peer.name!r} knows 'flexible' and 'compact'"
        )
    kind, text = spec.kind, spec.text
    if kind == "choices":
        kind, text = "regex", "|".join(re.escape(choice) for choice in json.loads(text))
    return PeerGrammar(spec, peer, vocabulary, peer.compile(kind, text, dict(spec.options)))


class PeerMatcher:
    """A ``Matcher`` of a peer."""

    __slots__ = ("_finished", "_tokens", "_walk", "error", "grammar")

    def __init__(self, grammar: PeerGrammar) -> None:
        self.grammar = grammar
        self.error: str | None = None
        self._walk = grammar.peer.walk(grammar.compiled)
        self._tokens: list[int] = []
        self._finished = False

    @property
    def num_tokens(self) -> int:
        return len(self._tokens) + self._finished

    @property
    def has_limit(self) -> bool:
        return False

    @property
    def is_closed_early(self) -> bool:
        return False

    @property
    def ends_by_limit(self) -> bool:
        return False

    @property
    def state(self) -> int:
        """Equal for equal texts; -1 after the end. Peers do not say which different texts are equivalent."""
        return -1 if self._finished else hash(tuple(self._tokens)) & 0x7FFFFFFFFFFFFFFF

    def mask(self) -> np.ndarray:
        row = np.zeros(self.grammar.vocabulary.num_words, np.uint32)
        self.fill_mask(row)
        return row

    def fill_mask(self, row: np.ndarray) -> None:
        words = row.view(np.uint32)
        eos = self.grammar.vocabulary.eos
        end = np.uint32(1 << (eos & 31))
        words[:] = 0
        ends_here = self._finished or self.error is not None
        rest = self._rest()
        if rest and not ends_here:
            for end_at in range(1, len(rest) + 1):
                for token in self.grammar.peer.spelling.get(rest[:end_at], ()):
                    words[token >> 5] |= np.uint32(1 << (token & 31))
            return
        if not ends_here:
            self._walk.fill(words)
            words[eos >> 5] &= ~end
            ends_here = self._walk.may_end()
        if ends_here:
            words[eos >> 5] |= end

    def accept(self, token_id: int) -> bool:
        if self.error is not None:
            return False
        is_end = token_id == self.grammar.vocabulary.eos
        if self._finished or not (self.is_accepting() if is_end else self._takes(token_id)):
            self.error = f"token {token_id} refused at position {self.num_tokens} by {self.grammar.peer.name}"
            return False
        if is_end:
            self._finished = True
        else:
            self._tokens.append(token_id)
        return True

    def _takes(self, token_id: int) -> bool:
        vocabulary = self.grammar.vocabulary
        if not 0 <= token_id < len(vocabulary) or not vocabulary.is_text[token_id]:
            return False
        rest = self._rest()
        return rest.startswith(vocabulary.tokens[token_id]) if rest else self._walk.accept(token_id)

    def _rest(self) -> bytes:
        """The part of ``prefix`` that is still to be written; the peer does not see its tokens."""
        prefix = self.grammar.prefix
        if prefix:
            prefix = prefix[sum(len(self.grammar.vocabulary.tokens[t]) for t in self._tokens[: len(prefix)]) :]
        return prefix

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self.num_tokens:
            raise ValueError(f"cannot roll back {n} tokens: {self.num_tokens} were accepted")
        if n == 0:
            return
        if self.error is not None or self.grammar.prefix:  # after an error a peer's state is unknown: replay the text
            kept = self._tokens[: len(self._tokens) - (n - self._finished)]
            self.error, self._finished, self._tokens = None, False, kept
            self._walk = self._replayed()
            return
        if self._finished:
            self._finished = False
            n -= 1
        if n:
            self._walk.rollback(n)
            del self._tokens[-n:]

    def clone(self) -> "PeerMatcher":
        twin = PeerMatcher(self.grammar)
        twin.error, twin._finished, twin._tokens = self.error, self._finished, self._tokens.copy()
        twin._walk = twin._replayed()
        return twin

    def _replayed(self) -> "Walk":
        walk = self.grammar.peer.walk(self.grammar.compiled)
        room = len(self.grammar.prefix)
        for token in self._tokens:
            if room > 0:
                room -= len(self.grammar.vocabulary.tokens[token])
            else:
                assert walk.accept(token), token
        return walk

    def forced_tokens(self) -> list[int]:
        return []

    def knows(self, token_ids: Sequence[int]) -> bool:
        """A peer makes its masks in the step."""
        return True

    def is_accepting(self) -> bool:
        return self.error is None and (self._finished or (not self._rest() and self._walk.may_end()))

    def must_end(self) -> bool:
        if not self.is_accepting():
            return False
        row = self.mask()
        eos = self.grammar.vocabulary.eos
        row[eos >> 5] &= ~np.uint32(1 << (eos & 31))
        return not row.any()

    def is_finished(self) -> bool:
        return self._finished


def _spelling(vocabulary: Vocabulary) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for token in np.flatnonzero(vocabulary.is_text).tolist():
        found.setdefault(vocabulary.tokens[token], []).append(token)
    return found


class Guidance:
    name = "llguidance"

    def __init__(self, module: ModuleType, vocabulary: Vocabulary) -> None:
        self.lib: Any = module
        self.masks: Any = importlib.import_module("llguidance.numpy")
        self.spelling = _spelling(vocabulary)
        self.tokenizer = self.lib.LLTokenizer(self.lib.TokenizerWrapper(_Tokens(vocabulary)))

    def compile(self, kind: str, text: str, options: dict[str, Any]) -> Any:
        """The peer's own grammar object, for ``walk``. Raises GrammarError."""
        matcher = self.lib.LLMatcher
        try:
            match kind:
                case "json_schema" | "json":
                    schema = text if kind == "json_schema" else "{}"
                    overrides = {"whitespace_flexible": options.get("whitespace", "flexible") == "flexible"}
                    grammar = matcher.grammar_from_json_schema(schema, overrides=overrides)
                case "regex":
                    grammar = matcher.grammar_from_regex(text)
                case "lark":
                    grammar = matcher.grammar_from_lark(text)
                case _:
                    raise GrammarError(f"grammars of kind {kind!r} are not known to grammar engine {self.name!r}")
        except ValueError as error:
            raise error if isinstance(error, GrammarError) else GrammarError(f"{self.name}: {error}") from None
        probe = matcher(self.tokenizer, grammar)
        if probe.is_error():
            raise GrammarError(f"{self.name}: {probe.get_error()}")
        return grammar

    def walk(self, compiled: Any) -> "Walk":
        return GuidanceWalk(self.lib.LLMatcher(self.tokenizer, compiled), self.masks)


class GuidanceWalk:
    def __init__(self, matcher: Any, masks: Any) -> None:
        self.matcher, self.masks = matcher, masks

    def fill(self, row: np.ndarray) -> None:
        if not self.matcher.is_stopped():
            self.masks.fill_next_token_bitmask(self.matcher, row.view(np.int32).reshape(1, -1))

    def accept(self, token_id: int) -> bool:
        return bool(self.matcher.validate_tokens([token_id]) == 1 and self.matcher.consume_token(token_id))

    def rollback(self, n: int) -> None:
        self.matcher.rollback(n)

    def may_end(self) -> bool:
        return bool(self.matcher.is_accepting())


class _Tokens:
    """The tokenizer interface that llguidance expects."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos
        self.bos_token_id = None
        self.tokens = [t if t else b"\xff<special>" for t in vocabulary.tokens]
        self.special_token_ids = sorted(vocabulary.special)
        first: dict[bytes, int] = {}
        for token, data in enumerate(vocabulary.tokens):
            if vocabulary.is_text[token]:
                first.setdefault(data, token)
        self._first = first
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        if self._encode is not None:
            return self._encode(data.decode(errors="replace"))
        return [self._first[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in self._first]


class XGrammar:
    name = "xgrammar"

    def __init__(self, module: ModuleType, vocabulary: Vocabulary) -> None:
        self.lib: Any = module
        self.size = len(vocabulary)
        self.spelling = _spelling(vocabulary)
        tokens = [t if vocabulary.is_text[i] else b"" for i, t in enumerate(vocabulary.tokens)]
        info = self.lib.TokenizerInfo(tokens, self.lib.VocabType.RAW, stop_token_ids=[vocabulary.eos])
        self.compiler = self.lib.GrammarCompiler(info, max_threads=1)

    def compile(self, kind: str, text: str, options: dict[str, Any]) -> Any:
        flexible = options.get("whitespace", "flexible") == "flexible"
        try:
            match kind:
                case "json_schema":
                    return self.compiler.compile_json_schema(text, any_whitespace=flexible)
                case "json":
                    return self.compiler.compile_builtin_json_grammar()
                case "regex":
                    return self.compiler.compile_regex(text)
                case "ebnf":
                    return self.compiler.compile_grammar(text)
        except RuntimeError as error:
            raise GrammarError(f"{self.name}: {error}") from None
        raise GrammarError(f"grammars of kind {kind!r} are not known to grammar engine {self.name!r}")

    def walk(self, compiled: Any) -> "Walk":
        return XGrammarWalk(self.lib.GrammarMatcher(compiled), self.lib.allocate_token_bitmask(1, self.size))


class XGrammarWalk:
    def __init__(self, matcher: Any, words: Any) -> None:
        self.matcher, self.words = matcher, words

    def fill(self, row: np.ndarray) -> None:
        self.matcher.fill_next_token_bitmask(self.words)
        row[:] = np.asarray(self.words)[0].view(np.uint32)[: len(row)]

    def accept(self, token_id: int) -> bool:
        return bool(self.matcher.accept_token(token_id))

    def rollback(self, n: int) -> None:
        self.matcher.rollback(n)

    def may_end(self) -> bool:
        return bool(self.matcher.is_completed())


Peer = Guidance | XGrammar
Walk = GuidanceWalk | XGrammarWalk  # one text in the peer's own matcher
