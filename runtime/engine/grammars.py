"""Grammars by what they say: compiled once on threads of their own, shared by all that ask.

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
LARGE_TEXT = 32_000  # characters; compiling these may take a second


class Grammars:
    """``engine``: "phloem", or the name of the peer that compiles in its place.

    Small grammars and large ones have a thread each, so that none waits for the seconds that a stranger's may take.
    """

    def __init__(self, tokenizer: Tokenizer, *, engine: str) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._small = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large grammar")
        self._futures: dict[str, Future[constrained.CompiledGrammar]] = {}
        self._begun = self._small.submit(self._begin)
        # What the first grammar would have to wait for: the vocabulary's tables and compiled walks.
        self._first = self._small.submit(self._compile, GrammarSpec("json_schema", '{"type": "boolean"}'))

    def compile(self, spec: GrammarSpec) -> Future[constrained.CompiledGrammar]:
        """The compiled grammar, now or soon; equal specs are compiled once while somebody may still ask."""
        key = spec.key
        future = self._futures.pop(key, None)
        if future is None:
            threads = self._small if len(spec.text) <= LARGE_TEXT else self._large
            future = threads.submit(self._compile, spec)
        self._futures[key] = future  # the most recently asked for lies last
        while len(self._futures) > MOST_KEPT:
            oldest = next(iter(self._futures))
            if not self._futures[oldest].done():
                break
            del self._futures[oldest]
        return future

    def _begin(self) -> tuple[constrained.Vocabulary, Peer | None]:
        vocabulary = self._tokenizer.vocabulary()
        return vocabulary, None if self._engine == "phloem" else load_peer(self._engine, vocabulary)

    def _compile(self, spec: GrammarSpec) -> constrained.CompiledGrammar:
        vocabulary, peer = self._begun.result()
        if peer is not None:
            return cast(constrained.CompiledGrammar, compile_with(peer, spec, vocabulary))
        return constrained.compile(spec.kind, spec.text, vocabulary, **spec.options)

    def wait_until_ready(self) -> None:
        """Until a grammar that is asked for is the next thing to be compiled."""
        wait([self._first])

    def close(self) -> None:
        """Compile nothing more; what is being compiled goes on to its end."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)
