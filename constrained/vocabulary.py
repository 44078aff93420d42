"""A tokenizer's tokens as bytes, and the byte trie that grammars walk to make masks.

The trie lies flat in depth-first order; a node's subtree is the range [node, node_end[node]):

    node        0    1    2    3    4
    byte        a    b    c    b    x        tokens: a, ab, abc, b, bx
    depth       1    2    3    1    2
    node_end    3    3    3    5    5        refusing node 0 jumps to node 3
"""

import hashlib
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .native_code import native

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """A trie of tokens as flat arrays of N nodes.

    The tokens that end at node n are ``token_order[first_token[n]:first_token[n] + num_tokens[n]]``; those that end
    below it follow.
    """

    node_byte: np.ndarray  # uint8 [N]
    node_depth: np.ndarray  # int32 [N], 1 for the first byte
    node_end: np.ndarray  # int32 [N]
    first_token: np.ndarray  # int32 [N]
    num_tokens: np.ndarray  # int32 [N]
    token_order: np.ndarray  # int32 [tokens]
    max_depth: int

    @property
    def num_nodes(self) -> int:
        return len(self.node_byte)


class Vocabulary:
    """The tokens that a model can emit. No grammar allows a special token, except the end token ``eos``.

    ``encode``, if given, is the tokenizer's own: text to token ids without special ones.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Iterable[int],
        eos: int,
        *,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        if not 0 <= eos < len(tokens):
            raise ValueError(f"eos token {eos} is outside the vocabulary of {len(tokens)} tokens")
        self.tokens = list(tokens)
        self.special = frozenset(special) | {eos}
        self.eos = eos
        self.encode = encode
        self.compiler: object = None  # the Compiler of ``compiler_of``; guarded by ``lock``
        self.lock = threading.RLock()
        self._shared: dict[Hashable, Any] = {}  # guarded by ``lock``
        self._splits: dict[tuple[bytes, int], tuple[np.ndarray, Trie]] = {}
        self.num_words = (len(self.tokens) + 31) // 32
        self.is_text = np.ones(len(self.tokens), dtype=bool)
        self.is_text[[t for t in self.special if t < len(self.tokens)]] = False
        lengths = np.fromiter((len(t) for t in self.tokens), dtype=np.int64, count=len(self.tokens))
        self.is_text &= lengths > 0
        self.token_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.token_bytes = np.frombuffer(b"".join(self.tokens) + b"\0", dtype=np.uint8)
        text_ids = np.flatnonzero(self.is_text)
        self.trie = self.build_trie(text_ids)
        single = text_ids[lengths[text_ids] == 1]
        # Languages leave out bytes that are no token by themselves: no text can get stuck before such a byte.
        self.has_byte = np.zeros(256, dtype=bool)
        self.has_byte[self.token_bytes[self.token_offsets[single]]] = True

    @property
    def key(self) -> str:
        """Equal for equal vocabularies."""
        digest = hashlib.sha256(self.token_bytes.tobytes())
        digest.update(self.token_offsets.tobytes())
        digest.update(repr((sorted(self.special), self.eos)).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.tokens)

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """What all machines of the vocabulary use and none changes; ``make`` makes it the first time."""
        with self.lock:
            if key not in self._shared:
                self._shared[key] = make()
            found: T = self._shared[key]
            return found

    def having(self, mark: bytes) -> np.ndarray:
        """bool [V]: the tokens of text that hold a byte."""
        has = np.zeros(len(self), bool)
        places = np.flatnonzero(self.token_bytes[:-1] == mark[0])
        has[np.searchsorted(self.token_offsets, places, side="right") - 1] = True
        return has & self.is_text

    def split_text(self, within: np.ndarray, most: int) -> tuple[np.ndarray, Trie]:
        """Of the tokens of a mask, which stay within a string, those of at most ``most`` bytes, as a mask, and the trie
        of all others that may be allowed in the string: the longer ones and those with a quote."""
        key = within.tobytes(), most
        found = self._splits.get(key)
        if found is None:
            is_within = np.unpackbits(within.view(np.uint8), bitorder="little")[: len(self)].astype(bool)
            is_short = is_within & (np.diff(self.token_offsets) <= most)
            bits = np.zeros(32 * self.num_words, bool)
            bits[: len(self)] = is_short
            others = self.build_trie(np.flatnonzero((is_within | self.having(b'"')) & ~is_short))
            found = self._splits[key] = np.packbits(bits, bitorder="little").view(np.uint32), others
        return found

    def build_trie(self, token_ids: np.ndarray) -> Trie:
        """The trie of some tokens; costs one sort of them.

        NumPy sorts by their first bytes without Python's lock, for which another thread would wait 20 to 70 ms.
        """
        lengths = np.diff(self.token_offsets)[token_ids]
        firsts = np.zeros(len(token_ids), np.uint64)  # the first 8 bytes of each, 0 behind the end
        for at in range(8):
            data = self.token_bytes[
                np.where(lengths > at, self.token_offsets[token_ids] + at, -1)
            ]  # the last byte is 0
            firsts = firsts << np.uint64(8) | data.astype(np.uint64)
        by_first = np.argsort(firsts, kind="stable")
        order = token_ids[by_first].astype(np.int32)
        starts = np.flatnonzero(np.diff(firsts[by_first], prepend=~firsts[by_first[:1]]))
        ends = np.append(starts, len(order))[1:]
        for start, end in zip(starts[ends > starts + 1].tolist(), ends[ends > starts + 1].tolist(), strict=True):
            order[start:end] = sorted(order[start:end].tolist(), key=self.tokens.__getitem__)
        return Trie(*flat_trie(self.token_bytes, self.token_offsets, order))

    def trie_of_lengths(self, least: int, most: int) -> Trie:
        """The trie of the tokens of ``least`` to ``most`` bytes."""
        order = self.trie.token_order
        lengths = np.diff(self.token_offsets)[order]
        return Trie(*flat_trie(self.token_bytes, self.token_offsets, order[(lengths >= least) & (lengths <= most)]))


@native
def flat_trie(data, offsets, order):
    """The fields of ``Trie`` for words of ``data`` in sorted order."""
    total = 1
    for t in order:
        total += offsets[t + 1] - offsets[t]
    node_byte = np.zeros(total, np.uint8)
    depth = np.zeros(total, np.int32)
    end = np.zeros(total, np.int32)
    first = np.zeros(total, np.int32)
    count = np.zeros(total, np.int32)
    path = np.zeros(4096, np.int32)  # path[d]: the node of depth d on the way to the last token
    longest = 0
    for t in order:
        longest = max(longest, offsets[t + 1] - offsets[t])
    if longest >= 4096:
        path = np.zeros(longest + 1, np.int32)
    n = 0
    open_depth = 0
    previous = -1
    for at in range(len(order)):
        token = order[at]
        start = offsets[token]
        length = offsets[token + 1] - start
        common = 0
        if previous >= 0:
            before = offsets[previous]
            limit = min(length, offsets[previous + 1] - before)
            while common < limit and data[start + common] == data[before + common]:
                common += 1
        while open_depth > common:
            end[path[open_depth]] = n
            open_depth -= 1
        for d in range(common, length):
            node_byte[n] = data[start + d]
            depth[n] = d + 1
            first[n] = at
            path[d + 1] = n
            n += 1
        open_depth = length
        count[path[length]] += 1
        previous = token
    while open_depth > 0:
        end[path[open_depth]] = n
        open_depth -= 1
    return node_byte[:n].copy(), depth[:n].copy(), end[:n].copy(), first[:n].copy(), count[:n].copy(), order, longest
