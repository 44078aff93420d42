"""What a walk over a trie has reached, taken out of its mask and its notes in compiled code. Never walks itself."""

import numba as nb
import numpy as np

MANY_NOTED = 64  # from here on it is cheaper to look at every token once


@nb.njit(inline="always")
def _lacks(covered, order, first, end):
    """Whether one of some tokens is not in a mask."""
    for i in range(first, end):
        token = order[i]
        if covered[token >> 5] >> np.uint32(token & 31) & 1 == 0:
            return True
    return False


@nb.njit(cache=True)
def reached(node_byte, ends, first, order, noted, row, covered_before, marks, mark, limit):
    """What a walk found: ``row`` as at most ``limit`` tokens (else one that is none), and where tokens go on.

    Those are the children of the noted nodes that lead to tokens outside both ``row`` and ``covered_before``. Returns
    the tokens, the two masks as one, where each byte's children begin [257], the children, and a bit for each byte
    that has some [32]. A node may be noted twice; ``marks`` per node are set to ``mark``.
    """
    num_nodes = len(node_byte)
    covered = row | covered_before
    # the tokens of a subtree lie from first[] of its node to first[] of the node after it
    num_order = len(order)
    lacking = np.zeros(num_order + 1 if len(noted) > MANY_NOTED else 0, np.int32)
    for i in range(len(lacking) - 1):
        token = order[i]
        lacking[i + 1] = lacking[i] + (covered[token >> 5] >> np.uint32(token & 31) & 1 == 0)
    starts = np.zeros(257, np.int32)
    found = np.zeros(256, np.int32)
    count = 0
    for n in noted:
        if marks[n] == mark:
            continue
        marks[n] = mark
        end = ends[n]
        if len(lacking) > 0 and lacking[first[end] if end < num_nodes else num_order] == lacking[first[n]]:
            continue
        at = n + 1
        while at < ends[n]:
            end = ends[at]
            last = first[end] if end < num_nodes else num_order
            if len(lacking) > 0:
                goes_on = lacking[last] > lacking[first[at]]
            else:
                goes_on = _lacks(covered, order, first[at], last)
            if goes_on:
                if count == len(found):
                    more = np.zeros(4 * count, np.int32)
                    more[:count] = found
                    found = more
                found[count] = at
                count += 1
                starts[node_byte[at] + 1] += 1
            at = np.int64(end)
    firsts = np.zeros(32, np.uint8)
    for b in range(256):
        if starts[b + 1] > 0:
            firsts[b >> 3] |= np.uint8(1 << (b & 7))
        starts[b + 1] += starts[b]
    room = starts[:256].copy()
    children = np.zeros(count, np.int32)
    for i in range(count):
        byte = node_byte[found[i]]
        children[room[byte]] = found[i]
        room[byte] += 1
    return _tokens_of(row, limit), covered, starts, children, firsts


@nb.njit(cache=True)
def _tokens_of(mask, limit):
    """The tokens of a mask if they are at most so many; else one that is none."""
    out = np.zeros(limit, np.int32)
    count = 0
    for word in range(len(mask)):
        bits = mask[word]
        if bits == 0:
            continue
        for i in range(32):
            if bits >> np.uint32(i) & 1:
                if count == limit:
                    out[0] = -1
                    return out[:1].copy()
                out[count] = 32 * word + i
                count += 1
    return out[:count].copy()
