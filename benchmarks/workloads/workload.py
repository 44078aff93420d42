"""A workload: cases made from a seed, and one task in two forms, as a program and the plain way.

The program is a ``@function``. The plain form is a coroutine that sends chat requests and keeps the conversations
itself, as one writes it for any server with OpenAI's API. Both ask for the same messages and the same output tokens.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from phloem.lang.function import SglFunction

Messages = list[dict[str, str]]


class Client(Protocol):
    """How a plain form reaches a server or engine; it counts the requests and their tokens."""

    async def chat(
        self,
        messages: Messages,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        regex: str | None = None,
        schema: dict[str, Any] | None = None,
    ) -> str:
        """The answer to a conversation: exactly ``max_tokens`` tokens, or fewer where ``regex`` or ``schema`` ends it.

        Without ``temperature`` the answer is greedy.
        """
        ...

    async def beam(self, text: str, width: int, max_tokens: int) -> str:
        """The likeliest continuation of plain text by ``max_tokens`` tokens that a beam search finds."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the task. ``inputs``: the arguments of both forms; ``expected``: the right answer, or None."""

    inputs: dict[str, Any]
    expected: Any = None


@dataclass(frozen=True, slots=True)
class Workload:
    """One task. ``source``: the paper that has it.

    ``make(seed, n)`` gives ``n`` cases; other seeds share no prefix but instructions. ``program`` stores its result as
    ``s["answer"]`` and ``plain`` returns it: a text, or a list of texts. ``check(answer, expected)`` tells whether it
    is right; None where nothing can be said. ``count`` and ``quick``: cases of a full and of a quick run; ``large``: of
    a run on a model larger than the small ones (0: it would take the slowest engine minutes).
    ``free_tokens``: output tokens of a case outside grammars, which are the same for every system. Without
    ``counts_output`` systems count different tokens, and the counts are not compared.
    """

    name: str
    source: str
    make: Callable[[int, int], list[Case]]
    program: SglFunction
    plain: Callable[..., Awaitable[Any]]
    count: int
    quick: int
    free_tokens: int
    check: Callable[[Any, Any], bool] | None = None
    needs_grammar: bool = False
    large: int = 1
    counts_output: bool = True


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def contains(answer: str, expected: str) -> bool:
    return expected.lower() in answer.lower()


def equals(answer: str, expected: str) -> bool:
    return answer == expected
