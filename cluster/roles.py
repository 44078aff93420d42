"""Whether a prompt is computed on one engine and its text generated on another. Pure; no clocks.

    both      runs whole programs
    prefill   computes prompts of programs that are to generate on an engine with ``decode``, where that pays; where it
              does not, it runs whole programs
    decode    generates, and computes the other prompts of its programs

An engine that computes a long prompt delays every row that decodes there. A program whose prompt is computed elsewhere
moves (``migrate``) once it has its first token, which costs a copy of its KV. Both ways are counted in seconds, of the
program and of those that it delays:

    in one place     queue at D + prompt + prompt once for each row at D
    in two places    queue at P + prompt + prompt once for each row at P + copy once for each row at D + the switch

The prompt counts without what that engine has cached, and the copy without what D has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..protocol.errors import InvalidParams
from .loads import Loads

Role = Literal["both", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("both", "prefill", "decode")

SWITCH_STEPS = 2.0  # of the decode engine, while the program pauses
COPY_MEMORY_S = 300.0  # after which a measured copy counts 1 / e
# Of a copy, while none was measured lately: seconds for each, and as a share of the time to compute the tokens.
ASSUMED_COPY_S, ASSUMED_SHARE, ASSUMED_TOKENS = 0.01, 0.25, 200.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """``num_tokens`` of a new program; ``at_home`` of them are cached on ``home``, where it would run otherwise."""

    num_tokens: int
    home: str
    at_home: int


@dataclass(frozen=True, slots=True)
class HandOff:
    """The prefill engine, and the seconds that it saves."""

    engine: str
    gain_s: float


class CopyRate:
    """Learns what a copy of KV takes: seconds = a part for each copy + tokens x seconds a token.

    Least squares with forgetting. An assumption counts as one copy, so that a slow copy is tried again some time.
    """

    def __init__(self) -> None:
        self._squares, self._products = np.zeros((2, 2)), np.zeros(2)
        self._noted_s = 0.0

    def note(self, num_tokens: int, seconds: float, now_s: float) -> None:
        keep, x = self._keep(now_s), np.array([1.0, num_tokens])
        self._squares = keep * self._squares + np.outer(x, x)
        self._products = keep * self._products + x * seconds
        self._noted_s = now_s

    def s_per_token(self, prefill_s_per_token: float, now_s: float) -> float:
        keep = self._keep(now_s)
        sizes = np.array([1.0, ASSUMED_TOKENS])
        assumed = np.diag(sizes**2)
        products = keep * self._products + assumed @ (ASSUMED_COPY_S, ASSUMED_SHARE * prefill_s_per_token)
        _, per_token_s = np.linalg.solve(keep * self._squares + assumed, products)
        return max(float(per_token_s), 0.0)

    def _keep(self, now_s: float) -> float:
        return math.exp(-max(now_s - self._noted_s, 0.0) / COPY_MEMORY_S)


def best_hand_off(
    prompt: Prompt, loads: Loads, prefill: Mapping[str, int], *, copy_s_per_token: float, now_s: float
) -> HandOff | None:
    """The prefill engine that saves most; None where computing the prompt at home is no worse.

    ``prefill``: engines of ``loads``, and how many tokens of the prompt each has cached.
    """
    home = loads.position[prompt.home]
    queued_s = loads.queued_s(now_s)
    new = prompt.num_tokens - prompt.at_home
    rows = min(loads.rows[home], loads.max_rows[home])
    alone_s = queued_s[home] + new * loads.prefill_s_per_token[home] * (1 + rows)
    switch_s = new * copy_s_per_token * rows + SWITCH_STEPS * (loads.step_s[home] + rows * loads.row_s[home])
    best: HandOff | None = None
    for engine, cached in prefill.items():
        at = loads.position[engine]
        others = min(loads.rows[at], loads.max_rows[at])
        there_s = queued_s[at] + (prompt.num_tokens - cached) * loads.prefill_s_per_token[at] * (1 + others)
        gain_s = float(alone_s - there_s - switch_s)
        if gain_s > 0 and (best is None or gain_s > best.gain_s):
            best = HandOff(engine, gain_s)
    return best


def roles_of(replicas: int, roles: Sequence[Role]) -> tuple[Role, ...]:
    """Of each of so many replicas; those that ``roles`` does not name have ``both``.

    Raises InvalidParams where there are more roles than replicas, or only one of ``prefill`` and ``decode``.
    """
    if len(roles) > replicas:
        raise InvalidParams(f"{len(roles)} roles for {replicas} replicas; give one for each, or fewer", where="role")
    rest: list[Role] = ["both"] * (replicas - len(roles))
    found = (*roles, *rest)
    if unknown := [role for role in found if role not in ROLES]:
        raise InvalidParams(f"role={unknown[0]!r} is not one of: {', '.join(ROLES)}", where="role")
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if role in found and other not in found:
            text = f"role={role!r} needs a replica with the role {other!r}: one computes prompts, the other generates"
            raise InvalidParams(f"{text}; give both, or leave them out", where="role")
    return found
