"""Which tokens of a batch have the beginnings of their contexts in common, and where these lie. Never holds keys.

Contexts are compared in chunks. Tokens are put into an order in which those that share stand side by side; a piece is
a few of them, and the chunks that are read for all of them at once. A token reads the chunks after its pieces' itself.

contexts   t0  A B C .        order  t0 t2 t1 t3      pieces  t0 t2 t1 | A
           t1  A D .                                          t0 t2    | B C
           t2  A B C E .      own_from  3 1 3 0
           t3  F .
"""

from dataclasses import dataclass

from torch import Tensor

PIECE_FIELDS = 5  # begin and end in the order, a row whose slots are read, first chunk and the one after the last


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """All chunks of a piece lie before the new tokens of its rows, so each of its tokens sees all of them."""

    order: Tensor  # int32 [T]
    pieces: Tensor  # int32 [P, PIECE_FIELDS]; one that begins where it ends is none
    own_from: Tensor  # int32 [T]: the first chunk that a token of the batch reads itself


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a device wants shared prefixes cut, and from when on they pay."""

    chunk_len: int  # keys
    piece_len: int  # tokens
    least_bytes: int  # of keys and values not read again, in a layer
