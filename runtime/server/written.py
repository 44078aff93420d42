"""The tokens in which the model wrote the answers of a conversation, for when the conversation comes back as text.

A client of a chat API sends a conversation again as text. Tokenized anew, an answer in it may have other tokens, which
the cache does not hold. ``WrittenAnswers`` remembers such answers by the whole conversation before them.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .jobs import Part

MAX_ANSWERS = 4096
MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """``text`` begins at character ``at`` of part ``part`` of the prompts after it; the model wrote ``token_ids``."""

    part: int
    at: int
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """The last prompt of a conversation, as the template rendered it, and the answers in it and to it."""

    prompt: list[Part]
    answers: tuple[WrittenAnswer, ...] = ()

    def with_answer(self, text: str, token_ids: tuple[int, ...]) -> "Written":
        """With the answer to the prompt."""
        last = self.prompt[-1]
        part, at = (len(self.prompt) - 1, len(last)) if isinstance(last, str) else (len(self.prompt), 0)
        return Written(self.prompt, (*self.answers, WrittenAnswer(part, at, text, token_ids)))

    def kept_in(self, parts: list[Part]) -> list[Part]:
        """``parts`` with the answers' own tokens in place of their texts, where ``is_in(parts)``.

        Tokenized anew, a text may have other tokens, which the cache does not hold. An answer stays text where the
        template writes it otherwise, for example because it drops reasoning.
        """
        kept = list(parts)
        for answer in reversed(self.answers):
            here = kept[answer.part] if answer.part < len(kept) else ()
            if answer.text and isinstance(here, str) and here.startswith(answer.text, answer.at):
                cut: list[Part] = [here[: answer.at], answer.token_ids, here[answer.at + len(answer.text) :]]
                kept[answer.part : answer.part + 1] = [part for part in cut if part]
        return kept

    def is_in(self, parts: list[Part]) -> bool:
        """Whether ``parts`` begin with the prompt."""
        *before, last = self.prompt
        here = parts[len(before)] if len(before) < len(parts) else ()
        is_same = here.startswith(last) if isinstance(here, str) and isinstance(last, str) else here == last
        return is_same and parts[: len(before)] == before

    @property
    def size_bytes(self) -> int:
        texts = sum(len(part) if isinstance(part, str) else 8 * len(part) for part in self.prompt)
        return texts + sum(len(answer.text) + 8 * len(answer.token_ids) for answer in self.answers)


class WrittenAnswers:
    """Bounded in answers and tokens; the least recently used are dropped first. Used by the event loop and the thread
    of long requests.

    ``space`` tells apart conversations that share nothing: those of other tenants, cache salts and adapters.
    """

    def __init__(self, *, max_answers: int = MAX_ANSWERS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_answers, self._max_tokens = max_answers, max_tokens
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[int, tuple[int, ...]]] = OrderedDict()  # where in its part, and its tokens
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, space: str, prompt: Sequence[Part], text: str, token_ids: tuple[int, ...]) -> None:
        """Remember the answer ``text`` to ``prompt``, which the model wrote as ``token_ids``."""
        *before, last = prompt if prompt and isinstance(prompt[-1], str) else (*prompt, "")
        assert isinstance(last, str)
        *_, (_, key) = _keys(space, (*before, last + text))
        with self._lock:
            self._drop(key)
            self._kept[key] = len(last), token_ids
            self._num_tokens += len(token_ids)
            while len(self._kept) > self._max_answers or self._num_tokens > self._max_tokens:
                self._drop(next(iter(self._kept)))

    def found_in(self, space: str, parts: Sequence[Part]) -> tuple[WrittenAnswer, ...]:
        """The remembered answers that are texts of ``parts``, each after the same conversation as when it was kept."""
        found: list[WrittenAnswer] = []
        if not self._kept:
            return ()
        with self._lock:
            for number, key in _keys(space, parts):
                known = self._kept.get(key)
                if known is None:
                    continue
                self._kept.move_to_end(key)
                at, token_ids = known
                part = parts[number]
                assert isinstance(part, str)
                found.append(WrittenAnswer(number, at, part[at:], token_ids))
        return tuple(found)

    def _drop(self, key: bytes) -> None:
        _, token_ids = self._kept.pop(key, (0, ()))
        self._num_tokens -= len(token_ids)


def _keys(space: str, parts: Sequence[Part]) -> Iterator[tuple[int, bytes]]:
    """The number of each part that is text, and a digest of everything up to its end."""
    digest = hashlib.blake2b(space.encode(), digest_size=16)
    for number, part in enumerate(parts):
        if isinstance(part, str):
            data = part.encode(errors="surrogatepass")
            digest.update(b"text %d " % len(data) + data)
            yield number, digest.copy().digest()
        else:
            digest.update(b"tokens %d " % len(part) + repr(part).encode())
