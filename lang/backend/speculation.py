"""API speculative execution: one call generates ahead, and later gens are read from its text.

A completion model generates beyond the end of a gen; the next constants and gens use that text as long as it matches.
A chat model generates its whole turn, which must contain the program's constants in order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import msgspec

from ...protocol.errors import InvalidRequest, PhloemError
from ..nodes import GenNode, Node, RoleNode, TextNode
from ..sampling_params import SglSamplingParams
from ..values import Leaf
from .executor import Ahead, StreamExecutor

MAX_TRIES = 3  # requests for one turn of a chat model


class Caller(Protocol):
    """The session that sends the calls and keeps their texts."""

    def params_of(self, node: GenNode) -> SglSamplingParams: ...

    def take_text(self, executor: StreamExecutor, node: GenNode, text: str, meta: dict[str, Any]) -> None: ...

    def charge(self, meta: dict[str, Any] | None) -> None: ...


Steps = Generator[GenNode, Any, None]  # yields the calls to make, receives their results


def complete(caller: Caller, executor: StreamExecutor, node: GenNode) -> Steps:
    """A gen of a completion model: take its text from what an earlier call generated, or call the model."""
    params = caller.params_of(node)
    num_ahead = executor.num_api_spec_tokens
    assert num_ahead is not None
    if _is_plain(params, node):
        ahead = executor.ahead
        text = None if ahead is None else ahead.take(params)
        if text is not None:
            caller.take_text(executor, node, text, {"finish_reason": {"type": "stop"}, "is_speculated": True})
            return
        num_asked = max(params.max_new_tokens, num_ahead)
        written, meta = _checked((yield _asked(node, num_asked)))
        is_whole = (meta.get("finish_reason") or {}).get("type") == "stop"
        num_tokens = int(meta.get("completion_tokens") or num_asked)
        ahead = Ahead(written, num_tokens, is_whole, params.without_ends(), num_asked=num_asked)
        text = ahead.take(params)
        if text is not None:
            executor.ahead = ahead
            caller.take_text(executor, node, text, meta)
            return
        caller.charge(meta)
    executor.ahead = None  # the longer text does not show where this gen ends: generate it alone
    text, meta = _checked((yield node))
    caller.take_text(executor, node, text, meta)


def converse(caller: Caller, executor: StreamExecutor, node: GenNode) -> Steps:
    """A gen of a chat model. The first gen of a turn requests the whole turn; the others take their text from it."""
    planned = executor.planned
    if planned is None:
        parts = [executor.text_[executor.cur_role_begin_pos :], *_rest_of_turn(executor.queue)]
        drawn_by = caller.params_of(node).without_ends()
        for part in parts:
            if isinstance(part, str):
                continue
            if not _is_plain(caller.params_of(part), part):
                raise InvalidRequest(
                    f"gen({part.leaf.name!r}): num_api_spec_tokens reads all gens of a turn from one answer, so they "
                    "take only stop and sampling parameters; remove n, grammars and log-probabilities"
                )
            if caller.params_of(part).without_ends() != drawn_by:
                raise InvalidRequest(
                    f"gen({part.leaf.name!r}): num_api_spec_tokens sends all gens of an assistant turn as one request, "
                    f"so only stop and max_tokens may differ from those of the first, gen({node.leaf.name!r})"
                )
        for attempt in range(1, MAX_TRIES + 1):
            assert executor.num_api_spec_tokens is not None
            written, meta = _checked((yield _asked(node, executor.num_api_spec_tokens)))
            planned = match_turn(parts, written, caller)
            if planned is not None:
                break
            caller.charge(meta)
            if attempt == MAX_TRIES:
                wanted = "".join(p if isinstance(p, str) else f"{{{p.leaf.name}}}" for p in parts)
                raise PhloemError(
                    f"the model's turn does not match the program after {MAX_TRIES} tries: expected {wanted!r}, but "
                    f"got {written!r}; show the form in an example, give each gen a stop, or use one gen per turn"
                )
        executor.planned = planned
        caller.charge(meta)
    assert planned is not None
    if (text := planned.pop(id(node.leaf), None)) is None:
        raise InvalidRequest(
            f"gen({node.leaf.name!r}) was appended after a value of its assistant turn was read; num_api_spec_tokens "
            "sends a turn as one request, so write the whole turn before reading its values"
        )
    caller.take_text(executor, node, text, {"finish_reason": {"type": "stop"}, "is_speculated": True})


def match_turn(parts: Sequence[str | GenNode], text: str, caller: Caller) -> dict[int, str] | None:
    """The text of each gen by the id of its leaf; None if ``text`` does not match. Ignores leading blanks."""
    found: dict[int, str] = {}
    at = 0
    parts = [part for part in parts if part != ""]
    for i, part in enumerate(parts):
        if isinstance(part, str):
            if i == 0:
                part, text = part.lstrip(), text.lstrip()
            if not text.startswith(part, at):
                return None
            at += len(part)
            continue
        stops = list(caller.params_of(part).stop)
        after = parts[i + 1] if i + 1 < len(parts) else None
        if isinstance(after, str):
            stops.append(after)
        ends = [end for stop in stops if (end := text.find(stop, at)) >= 0]
        if not ends and after is not None:
            return None
        end = min(ends, default=len(text))
        found[id(part.leaf)] = text[at:end]
        at = end
    return found


def _rest_of_turn(queue: Sequence[Node]) -> list[str | GenNode]:
    """The queued texts and gens of this turn, adjacent texts joined."""
    parts: list[str | GenNode] = []
    for node in queue:
        if isinstance(node, GenNode):
            parts.append(node)
        elif isinstance(node, TextNode):
            if parts and isinstance(parts[-1], str):
                parts[-1] += node.text
            else:
                parts.append(node.text)
        elif isinstance(node, RoleNode):
            break
        else:
            raise InvalidRequest(
                "num_api_spec_tokens allows only texts and gens in an assistant turn of a chat model; put select, fork "
                "and images outside of the turn"
            )
    return parts


def _is_plain(params: SglSamplingParams, node: GenNode) -> bool:
    """Whether the gen can be read from a longer text."""
    given = (params.dtype, params.regex, params.json_schema, params.ebnf, params.return_logprob or None)
    return node.n == 1 and all(value is None for value in given) and not params.stop_token_ids and not params.stop_regex


def _asked(node: GenNode, max_tokens: int) -> GenNode:
    """The gen's call with ``max_tokens`` and without a stop."""
    overrides = {**node.defaults, **node.gen.overrides, "max_tokens": max_tokens}
    overrides.pop("stop", None)
    gen = msgspec.structs.replace(node.gen, overrides=overrides)
    return GenNode(node.seq, Leaf(node.leaf.lock, None), gen, {}, 1, False)


def _checked(result: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(result, BaseException):
        raise result
    text, meta = result
    return (text if isinstance(text, str) else text[0]), meta or {}
