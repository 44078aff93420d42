"""The tokens of a program's first prompt, for its placement: as far as they are known before anything runs."""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.ops import AnyOp, Fork, Mark, Pin, Special, Text
from ..runtime.tokenizer import Tokenizer


def first_prompt(ops: Iterable[AnyOp], tokenizer: Tokenizer) -> list[int]:
    """The tokens with which the first op's sequence begins, as the engine makes them.

    They end before the first op that generates, chooses or scores, or whose text is not known yet.
    """
    ids: list[int] = []
    pending: list[str] = []  # texts that follow each other are tokenized as one

    def append(new: list[int]) -> None:
        bos = tokenizer.bos_id if tokenizer.add_bos and not ids else None
        ids.extend(new if bos is None or new[:1] == [bos] else [bos, *new])

    def flush() -> None:
        if pending:
            text = "".join(pending)
            pending.clear()
            append(tokenizer.encode(text, at_start=not ids))

    seq: int | None = None
    for op in ops:
        seq = op.seq if seq is None else seq
        if op.seq != seq:
            continue
        match op:
            case Text():
                pending.append(op.text)
            case Special():
                flush()
                append(list(op.ids))
            case Fork() | Pin():
                flush()
            case Mark():
                pass
            case _:
                break
    flush()
    return ids
