"""The parts of a trie that are text of a JSON string without escapes, found once per trie in compiled code."""

import numpy as np

from ..native_code import native


def _following() -> np.ndarray:
    """The state after a byte, int8 [9, 256]: 0 between two characters, 1 to 3 bytes missing, 4 to 7 after E0, ED, F0,
    F4; -1 (the last row too) not text."""
    table = np.full((9, 256), -1, np.int8)
    table[0, 0x20:0x80] = 0
    table[0, [0x22, 0x5C]] = -1
    table[0, 0xC2:0xE0], table[0, 0xE0:0xF0], table[0, 0xF0:0xF4] = 1, 2, 3
    table[0, [0xE0, 0xED, 0xF0, 0xF4]] = 4, 5, 6, 7
    for state in (1, 2, 3):
        table[state, 0x80:0xC0] = state - 1
    table[4, 0xA0:0xC0] = table[5, 0x80:0xA0] = 1
    table[6, 0x90:0xC0] = table[7, 0x80:0x90] = 2
    return table


FOLLOWING = _following()


@native
def text_slices(node_byte, node_depth, node_end, first_token, num_tokens, token_order, has_byte):
    """What ``walk_trie`` needs to allow all text of a string at once.

    Returns ``inside`` (per node: whole characters of text lead to it), the tokens of nothing but text in trie order,
    how many of them come before each node, the nodes where text stops (boundaries), and how many of those come before
    each node.
    """
    num_nodes = len(node_byte)
    inside = np.zeros(num_nodes + 1, np.uint8)
    covered_before = np.zeros(num_nodes + 1, np.int32)
    boundaries_before = np.zeros(num_nodes + 1, np.int32)
    covered = np.zeros(len(token_order), np.int32)
    boundaries = np.zeros(num_nodes, np.int32)
    longest = 1
    for n in range(num_nodes):
        longest = max(longest, node_depth[n] + 1)
    at_depth = np.zeros(longest + 1, np.int8)
    num_covered = 0
    num_boundaries = 0
    for n in range(num_nodes):
        covered_before[n] = num_covered
        boundaries_before[n] = num_boundaries
        before = at_depth[node_depth[n] - 1]
        byte = node_byte[n]
        state = FOLLOWING[before, byte] if has_byte[byte] else np.int8(-1)
        if before == 0 and state < 0 and byte < 0x80 and has_byte[byte]:
            boundaries[num_boundaries] = n
            num_boundaries += 1
        at_depth[node_depth[n]] = state
        if state == 0:
            inside[n] = 1
        if state >= 0:
            for i in range(first_token[n], first_token[n] + num_tokens[n]):
                covered[num_covered] = token_order[i]
                num_covered += 1
    covered_before[num_nodes] = num_covered
    boundaries_before[num_nodes] = num_boundaries
    return inside, covered[:num_covered].copy(), covered_before, boundaries[:num_boundaries].copy(), boundaries_before
