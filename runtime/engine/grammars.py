"""Compiled grammars by their spec: each is compiled once, on a thread, and shared by all generations that use it.

A failed compilation is kept as well: the same spec fails again without being compiled.
"""

from __future__ import annotations

import logging
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, cast

from ... import constrained
from ...constrained import compiling
from ...constrained.peers import Peer, compile_with, load_peer
from ...constrained.spec import GrammarSpec
from ...cpu_isa import CpuIsa
from .priority import behind_steps

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

log = logging.getLogger(__name__)

MOST_KEPT = 256
LARGE_TEXT = 32_000  # characters; compiling these may take a second


class Grammars:
    """``engine``: "phloem", or the name of another library that compiles instead (``constrained.peers``).

    Small and large grammars have a thread each, so that a small one does not wait seconds for a large one.
    """

    def __init__(self, tokenizer: Tokenizer, *, engine: str, cpu_isa: CpuIsa = "auto") -> None:
        self._cpu_isa = cpu_isa
        self._walks: subprocess.Popen[bytes] | None = None  # compiles them
        self._is_closed = False
        self._tokenizer = tokenizer
        self._engine = engine
        self._small = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large grammar", initializer=behind_steps)
        self._futures: dict[str, Future[constrained.CompiledGrammar]] = {}
        self._begun: Future[tuple[constrained.Vocabulary, Peer | None]] | None = None
        self._first: Future[constrained.CompiledGrammar] | None = None

    def begin(self) -> None:
        """Make the vocabulary's tables and load the compiled walks on a thread, so that the first client's grammar
        waits less. That takes Python's lock a thousand times, for which a thread that loads a model would have to wait.

        Where the walks are not on disk yet, another process compiles them first, as this one's steps would wait.
        """
        if self._begun is None:
            self._begun = self._small.submit(self._begin)
            self._first = self._small.submit(self._compile, GrammarSpec("json_schema", '{"type": "boolean"}'))
            self._small.submit(behind_steps)  # not before: the first client's grammar needs these tables

    def compile(self, spec: GrammarSpec) -> Future[constrained.CompiledGrammar]:
        """The compiled grammar, perhaps still being compiled; an equal spec among the last MOST_KEPT is reused."""
        self.begin()
        key = spec.key
        future = self._futures.pop(key, None)
        if future is None:
            threads = self._small if len(spec.text) <= LARGE_TEXT else self._large
            future = threads.submit(self._compile, spec)
        self._futures[key] = future  # the most recently used is last
        while len(self._futures) > MOST_KEPT:
            oldest = next(iter(self._futures))
            if not self._futures[oldest].done():
                break
            del self._futures[oldest]
        return future

    def _begin(self) -> tuple[constrained.Vocabulary, Peer | None]:
        if self._engine == "phloem":
            self._compile_walks()
        vocabulary = self._tokenizer.vocabulary()
        return vocabulary, None if self._engine == "phloem" else load_peer(self._engine, vocabulary)

    def _compile_walks(self) -> None:
        walks = self._walks = compiling.begin(self._cpu_isa)
        if walks is None:
            return
        log.warning(
            "compiling the code that makes grammars' masks, once for this machine; "
            "answers with a grammar wait for it, a minute or two"
        )
        if self._is_closed:
            walks.kill()
        if walks.wait() and not self._is_closed:
            log.warning(
                "the process that compiles the code of grammars' masks ended with code %d; this one compiles it now",
                walks.returncode,
            )

    def _compile(self, spec: GrammarSpec) -> constrained.CompiledGrammar:
        assert self._begun is not None
        vocabulary, peer = self._begun.result()
        if peer is not None:
            return cast(constrained.CompiledGrammar, compile_with(peer, spec, vocabulary))
        grammar = constrained.compile(spec.kind, spec.text, vocabulary, **spec.options)
        _ = grammar.margin  # what endings need is found here, so that no step has to wait for it
        return grammar

    def wait_until_ready(self) -> None:
        """Return once the vocabulary's tables are made."""
        self.begin()
        assert self._first is not None
        wait([self._first])

    def close(self) -> None:
        """Cancel the compilations that have not begun."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)
        self._is_closed = True
        if self._walks is not None:
            self._walks.kill()
