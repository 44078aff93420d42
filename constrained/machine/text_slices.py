"""The parts of a trie that are text of a JSON string without escapes, found once per trie in compiled code."""

import numba as nb
import numpy as np


@nb.njit(cache=True)
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
    # State within a character: 0 between two, 1 to 3 bytes missing, 4 to 7 after E0, ED, F0, F4; -1 not text.
    at_depth = np.zeros(longest + 1, np.int8)
    num_covered = 0
    num_boundaries = 0
    for n in range(num_nodes):
        covered_before[n] = num_covered
        boundaries_before[n] = num_boundaries
        before = at_depth[node_depth[n] - 1]
        byte = node_byte[n]
        state = -1
        if not has_byte[byte]:
            state = -1
        elif before == 0:
            if byte < 0x80:
                state = 0 if byte >= 0x20 and byte != 0x22 and byte != 0x5C else -1
                if state < 0:
                    boundaries[num_boundaries] = n
                    num_boundaries += 1
            elif 0xC2 <= byte < 0xE0:
                state = 1
            elif byte == 0xE0:
                state = 4
            elif byte == 0xED:
                state = 5
            elif 0xE0 < byte < 0xF0:
                state = 2
            elif byte == 0xF0:
                state = 6
            elif byte == 0xF4:
                state = 7
            elif 0xF0 < byte < 0xF4:
                state = 3
        elif before > 0 and 0x80 <= byte < 0xC0:
            if before <= 3:
                state = before - 1
            elif before == 4:
                state = 1 if byte >= 0xA0 else -1
            elif before == 5:
                state = 1 if byte < 0xA0 else -1
            elif before == 6:
                state = 2 if byte >= 0x90 else -1
            else:
                state = 2 if byte < 0x90 else -1
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
