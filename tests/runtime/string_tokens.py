"""The tokens of the string engine: words with the blanks before them, and a ChatML template with invented ids."""

import re
import zlib

from phloem.protocol import messages, ops

SPECIAL_TEXT: dict[int, str] = {
    1: "<|im_start|>",
    2: "<|im_end|>",
    3: "\n",
    11: "system",
    12: "user",
    13: "assistant",
    14: "tool",
}
ROLE_IDS = {"system": 11, "user": 12, "assistant": 13, "tool": 14}
CHATML = messages.TemplateInfo(
    roles={role: messages.RoleTemplate(prefix=(1, id_, 3), suffix=(2, 3)) for role, id_ in ROLE_IDS.items()},
    stop_token_ids=(2,),
    source="chatml",
)
WORDS = ("sap", "leaf", "root", "bark", "ring", "seed", "bud", "stem", "wood", "bloom")


def pieces_of(text: str) -> list[str]:
    """The "tokens" of a text: words with the blanks before them; joined they are the text."""
    return re.findall(r"\s*\S+|\s+", text)


def piece_id(piece: str) -> int:
    return 100 + zlib.crc32(piece.encode()) % 30000


def logprobs_of(pieces: list[str], op: ops.Gen) -> tuple[messages.TokenLogprob, ...]:
    if not op.params.return_logprob:
        return ()
    top = op.params.top_logprobs_num
    return tuple(
        messages.TokenLogprob(
            token_id=piece_id(p),
            logprob=-0.5,
            text=p,
            top=((piece_id(p), -0.5, p), *((50 + i, -2.0 - i, WORDS[i % len(WORDS)]) for i in range(top - 1)))[:top],
        )
        for p in pieces
    )
