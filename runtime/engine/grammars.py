"""Grammars by what they say: compiled once on a thread of their own, shared by all that ask.

Never holds a matcher; a failed compilation stays failed for whoever asks again.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, cast

from ... import constrained
from ...constrained.peers import Peer, compile_with, load_peer
from ...constrained.spec import GrammarSpec

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

MOST_KEPT = 256


class Grammars:
    """``engine``: "phloem", or the name of the peer that compiles in its place."""

    def __init__(self, tokenizer: Tokenizer, *, engine: str) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._futures: dict[str, Future[constrained.CompiledGrammar]] = {}
        self._vocabulary: constrained.Vocabulary | None = None
        self._peer: Peer | None = None
        # What the first grammar would have to wait for: the vocabulary's tables and compiled walks.
        self._first = self._threads.submit(self._compile, GrammarSpec("json_schema", '{"type": "boolean"}'))

    def compile(self, spec: GrammarSpec) -> Future[constrained.CompiledGrammar]:
        """The compiled grammar, now or soon; equal specs are compiled once while somebody may still ask."""
        future = self._futures.pop(spec.key, None)
        if future is None:
            future = self._threads.submit(self._compile, spec)
        self._futures[spec.key] = future  # the most recently asked for lies last
        while len(self._futures) > MOST_KEPT:
            oldest = next(iter(self._futures))
            if not self._futures[oldest].done():
                break
            del self._futures[oldest]
        return future

    def _compile(self, spec: GrammarSpec) -> constrained.CompiledGrammar:
        if self._vocabulary is None:
            self._vocabulary = self._tokenizer.vocabulary()
        if self._engine != "phloem":
            if self._peer is None:
                self._peer = load_peer(self._engine, self._vocabulary)
            return cast(constrained.CompiledGrammar, compile_with(self._peer, spec, self._vocabulary))
        return constrained.compile(spec.kind, spec.text, self._vocabulary, **spec.options)

    def wait_until_ready(self) -> None:
        """Until a grammar that is asked for is the next thing to be compiled."""
        wait([self._first])

    def close(self) -> None:
        """Compile nothing more; what is being compiled goes on to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
