"""``phloem generate``: one answer to stdout."""

from __future__ import annotations

import json
from collections.abc import Callable

from .answers import Asking, Reply, Source, Wanted


def generate(
    source: Source,
    prompt: str,
    *,
    wanted: Wanted,
    system: str = "",
    is_raw: bool = False,
    as_json: bool = False,
    write: Callable[[str], object],
    note: Callable[[str], object],
) -> None:
    """Write the answer as it comes, or as one line of JSON. ``is_raw``: continue ``prompt`` without a chat template."""
    asking = source.complete(prompt, wanted) if is_raw else source.converse(_messages(system, prompt), wanted)
    if as_json:
        for _ in asking:
            pass
        write(json.dumps(_as_json(asking, source.name), ensure_ascii=False) + "\n")
        return
    for piece in asking:
        write(piece)
    if not asking.text.endswith("\n"):
        write("\n")
    reply = asking.reply()
    if reply.finish_reason == "length":
        note(f"the answer is cut after {reply.completion_tokens} tokens; --max-tokens allows more")


def _messages(system: str, prompt: str) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt}]


def _as_json(asking: Asking, model: str) -> dict[str, object]:
    reply: Reply = asking.reply()
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "completion_tokens": reply.completion_tokens,
    }
    return {"text": reply.text, "finish_reason": reply.finish_reason, "usage": usage, "model": model}
