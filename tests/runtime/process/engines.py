"""Engines that a child process can be told to run instead of the real one."""

import logging
import os
import time

from phloem.protocol import errors, messages
from phloem.runtime.config import EngineConfig, Progress
from phloem.tests.runtime.string_engine import Outbox, StringEngine


def plain(config: EngineConfig, progress: Progress | None) -> StringEngine:
    return StringEngine()


def slow(config: EngineConfig, progress: Progress | None) -> StringEngine:
    """An engine whose replies last longer than any test."""
    engine = StringEngine(reply=lambda prompt, op: " ".join(str(i) for i in range(100_000)))
    step = engine.step
    engine.step = lambda inbox: (time.sleep(0.002), step(inbox))[1]  # type: ignore[method-assign]
    return engine


def dying(config: EngineConfig, progress: Progress | None) -> StringEngine:
    engine = StringEngine()

    def step(inbox: list[tuple[bytes, messages.ClientMessage]]) -> Outbox:
        if inbox:
            os._exit(7)
        return []

    engine.step = step  # type: ignore[method-assign]
    return engine


def hanging(config: EngineConfig, progress: Progress | None) -> StringEngine:
    """Its first step with a message does not return; the log says when it begins."""
    engine = StringEngine()
    step = engine.step

    def hang(inbox: list[tuple[bytes, messages.ClientMessage]]) -> Outbox:
        if inbox:
            logging.getLogger(__name__).critical("the step hangs")
            time.sleep(600)
        return step(inbox)

    engine.step = hang  # type: ignore[method-assign]
    return engine


def unstartable(config: EngineConfig, progress: Progress | None) -> StringEngine:
    raise errors.UnknownModel(f"no model {config.model!r}; try smollm2")


def broken(config: EngineConfig, progress: Progress | None) -> StringEngine:
    raise RuntimeError("a fault while loading")


def compiling(config: EngineConfig, progress: Progress | None) -> StringEngine:
    assert progress is not None
    for done in (1, 2):
        progress("compiling", done, 2)
    return StringEngine()
