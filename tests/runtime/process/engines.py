"""Engines that a child process can be told to run instead of the real one."""

import os
import time

from phloem.runtime.config import EngineConfig
from phloem.runtime.protocol import errors, messages
from phloem.tests.runtime.string_engine import Outbox, StringEngine


class Served(StringEngine):
    """A string engine with what the loop asks of a real one; ``fail_on`` breaks its step while that text is around."""

    fail_on = ""

    def fail_all(self, error: errors.InternalError) -> Outbox:
        return []

    def close(self) -> None:
        pass


def plain(config: EngineConfig) -> Served:
    return Served()


def slow(config: EngineConfig) -> Served:
    """Its replies are endless for a test's purpose."""
    engine = Served(reply=lambda prompt, op: " ".join(str(i) for i in range(100_000)))
    step = engine.step
    engine.step = lambda inbox: (time.sleep(0.002), step(inbox))[1]  # type: ignore[method-assign]
    return engine


def dying(config: EngineConfig) -> Served:
    engine = Served()

    def step(inbox: list[tuple[bytes, messages.ClientMessage]]) -> Outbox:
        if inbox:
            os._exit(7)
        return []

    engine.step = step  # type: ignore[method-assign]
    return engine


def unstartable(config: EngineConfig) -> Served:
    raise errors.UnknownModel(f"no model {config.model!r}; try smollm2")


def broken(config: EngineConfig) -> Served:
    raise RuntimeError("a fault while loading")
