"""Special tokens by their spelling, for files that do not mark them."""

import re
import secrets
from collections.abc import Mapping

END_OF_TEXT = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endofturn|>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
    "</s>",
)
_CONTROL = re.compile(r"<\|[^\s|<>]+\|>|<｜[^\s｜<>]+｜>")


def looks_like_control(text: str) -> bool:
    """True for spellings such as ``<|im_end|>``. Some files mark them as text, which would let users type them."""
    return text in END_OF_TEXT or _CONTROL.fullmatch(text) is not None


def end_of_text_ids(id_of_special: Mapping[str, int]) -> frozenset[int]:
    """Those of the special tokens that end a text or a turn in every model known to use them."""
    return frozenset(id_of_special[text] for text in END_OF_TEXT if text in id_of_special)


class HiddenNames:
    """Names of special tokens inside a backend. They hold a secret salt, so no text can spell them."""

    def __init__(self) -> None:
        self._salt = secrets.token_hex(8)

    def __getitem__(self, token_id: int) -> str:
        return f"\x00{self._salt} {token_id}\x00"
