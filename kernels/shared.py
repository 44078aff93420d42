"""Shared prefixes: which tokens of a batch have the same chunks at the start of their contexts.

Contexts are compared chunk by chunk. Tokens are ordered so that those with common chunks are neighbours. A piece is a
range of that order together with the chunks that the kernel reads once for all its tokens. Each token reads the chunks
after those of its pieces by itself.

contexts   t0  A B C .        order  t0 t2 t1 t3      pieces  t0 t2 t1 | A
           t1  A D .                                          t0 t2    | B C
           t2  A B C E .      own_from  3 1 3 0
           t3  F .
"""

from dataclasses import dataclass

from torch import Tensor

PIECE_FIELDS = 5  # begin and end in the order, the row whose slots are read, first chunk, end of its chunks


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """All chunks of a piece lie before its rows' new tokens, so each of its tokens attends to all of them."""

    order: Tensor  # int32 [T]
    pieces: Tensor  # int32 [P, PIECE_FIELDS]; a piece with begin = end is padding
    own_from: Tensor  # int32 [T]: the first chunk that each token reads by itself


@dataclass(frozen=True, slots=True)
class Sharing:
    """How prefixes are cut for a device, and how much sharing is worth a kernel launch."""

    chunk_len: int  # keys
    piece_len: int  # tokens
    least_bytes: int  # of keys and values that sharing saves in a layer, at least
