"""Our grammars and installed peers' behind one interface: compile, then walk a text."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from phloem.constrained import GrammarError, GrammarKind, Vocabulary, compile
from phloem.runtime.tokenizer import Tokenizer


class Walker(Protocol):
    """One text under a grammar of some engine. ``fill`` returns whether ``token`` is allowed, timed by the caller."""

    def fill(self) -> None: ...

    def allows(self, token: int) -> bool: ...

    def accept(self, token: int) -> bool: ...

    def may_end(self) -> bool: ...


class Engine(Protocol):
    name: str

    def compile(self, kind: GrammarKind, text: str, options: dict[str, str]) -> Callable[[], Walker]:
        """Raises ``Refused``."""
        ...


class Refused(Exception):
    pass


def engines(tokenizer: Tokenizer, with_peers: bool) -> Iterator[Engine]:
    yield Phloem(tokenizer.vocabulary())
    for peer in (Guidance, XGrammar) if with_peers else ():
        try:
            yield peer(tokenizer)
        except ImportError:
            print(f"{peer.name}: not installed")


class Phloem:
    name = "phloem"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def compile(self, kind: GrammarKind, text: str, options: dict[str, str]) -> Callable[[], Walker]:
        try:
            grammar = compile(kind, text, self.vocabulary, **options)
        except GrammarError as error:
            raise Refused(str(error)) from None
        return lambda: PhloemWalker(grammar.matcher(), self.vocabulary)


class PhloemWalker:
    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self.row = np.zeros(vocabulary.num_words, np.uint32)
        self.matcher = matcher
        self.accept = matcher.accept

    def fill(self) -> None:
        self.matcher.fill_mask(self.row)

    def allows(self, token: int) -> bool:
        return bool(int(self.row[token >> 5]) >> (token & 31) & 1)

    def may_end(self) -> bool:
        return self.matcher.is_accepting()


class Guidance:
    name = "llguidance"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        self.lib = llguidance
        tokens = [t if t else b"\xff<special>" for t in tokenizer.token_bytes]
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_RawTokens(tokenizer, tokens)))
        self.num_words = (len(tokens) + 31) // 32
        self.eos = min(tokenizer.eos_ids)

    def compile(self, kind: GrammarKind, text: str, options: dict[str, str]) -> Callable[[], Walker]:
        matcher = self.lib.LLMatcher
        make = {
            "json_schema": matcher.grammar_from_json_schema,
            "regex": matcher.grammar_from_regex,
            "lark": matcher.grammar_from_lark,
        }
        if kind not in make:
            raise Refused(f"no {kind}")
        try:
            grammar = make[kind](text)
        except ValueError as error:
            raise Refused(str(error)) from None
        if matcher(self.tokenizer, grammar).is_error():
            raise Refused(matcher(self.tokenizer, grammar).get_error())
        return lambda: GuidanceWalker(matcher(self.tokenizer, grammar), self.num_words)


class _RawTokens:
    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = tokens
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


class GuidanceWalker:
    def __init__(self, matcher: Any, num_words: int) -> None:
        import llguidance.numpy

        self.fill_next = llguidance.numpy.fill_next_token_bitmask
        self.row = np.zeros((1, num_words), np.int32)
        self.matcher = matcher

    def fill(self) -> None:
        self.fill_next(self.matcher, self.row)

    def allows(self, token: int) -> bool:
        return bool(int(self.row[0, token >> 5]) >> (token & 31) & 1)

    def accept(self, token: int) -> bool:
        return self.matcher.consume_token(token)

    def may_end(self) -> bool:
        return self.matcher.is_accepting()


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self.lib = xgrammar
        info = xgrammar.TokenizerInfo(
            tokenizer.token_bytes, xgrammar.VocabType.RAW, stop_token_ids=sorted(tokenizer.eos_ids)
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.size = len(tokenizer.token_bytes)

    def compile(self, kind: GrammarKind, text: str, options: dict[str, str]) -> Callable[[], Walker]:
        make = {
            "json_schema": self.compiler.compile_json_schema,
            "regex": self.compiler.compile_regex,
            "ebnf": self.compiler.compile_grammar,
        }
        if kind not in make:
            raise Refused(f"no {kind}")
        try:
            grammar = make[kind](text)
        except RuntimeError as error:
            raise Refused(str(error)) from None
        return lambda: XGrammarWalker(self.lib, grammar, self.size)


class XGrammarWalker:
    def __init__(self, lib: Any, grammar: Any, size: int) -> None:
        self.matcher = lib.GrammarMatcher(grammar, terminate_without_stop_token=True)
        self.row = lib.allocate_token_bitmask(1, size)
        self.accept = self.matcher.accept_token

    def fill(self) -> None:
        self.matcher.fill_next_token_bitmask(self.row)

    def allows(self, token: int) -> bool:
        return bool(int(self.row[0, token >> 5]) >> (token & 31) & 1)

    def may_end(self) -> bool:
        return self.matcher.is_terminated()
