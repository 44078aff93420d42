"""The compiled walks: one byte, one token, a whole trie, through a machine's tables. Never grows a table.

A machine's tables are passed as one int64 array of addresses (``control``), which costs a call 0.3 us where fifteen
arrays cost 3. A walk that meets an entry not yet known notes it, skips the subtree, and is resumed there later.

    transition of (state, aux, stack) by a byte:
      white space where the state allows it     -> the white space automaton, held in aux
      delta[state, byte] = another state        -> go there
      delta[state, byte] >= PUSH                -> push a frame, go to its start
      delta[state, byte] < 0, the state may end -> pop: continue in after[frame, result] with the same byte
      delta[state, byte] < 0 otherwise          -> refused
"""

import numba as nb
import numpy as np
from numba.core import types
from numba.extending import intrinsic

PUSH = 1 << 28
UNKNOWN, REFUSED = 0, -1  # what a row holds before it is filled, and for a refused byte

# Slots of ``control``.
(
    DELTA, ENDS, FINAL, SPACE, LOCAL, COUNTED, ACT_FRAME, ACT_STATE, FRAME_FILTER, FRAME_LOW, FRAME_HIGH, FILTERS,
    HASH_KEYS, HASH_VALUES, HASH_MASK, STACK_FRAME, STACK_PARENT, STACK_DEPTH, STACK_LIMIT, SPACE_DELTA, SPACE_CLASS,
    TOKEN_BYTES, TOKEN_OFFSETS, LAZY, MASK, SCRATCH, LOWEST, OUT_STATE, OUT_AUX, OUT_STACK, MISS_A, MISS_B,
) = range(32)  # fmt: skip
CONTROL_SIZE = 32

# Slots of a trie's array of addresses.
T_BYTE, T_DEPTH, T_END, T_FIRST, T_COUNT, T_ORDER, T_NODES = range(7)

OK, DEAD, MISS_ROW, MISS_AFTER, FULL, EXIT, EXIT_AFTER = range(7)
UNBOUNDED = 1 << 40  # an upper bound that is none
EXITED = 1 << 30  # where a barrier goes on: the walk stops there and is taken up for each real frame


@intrinsic
def _pointer(typingctx, address, like):
    """An int64 address as a pointer to the type of ``like``."""
    result = types.CPointer(like)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.int64, like), codegen


@nb.njit(inline="always")
def _u8(address):
    return nb.carray(_pointer(address, np.uint8(0)), (1,))  # type: ignore[call-arg]


@nb.njit(inline="always")
def _i32(address):
    return nb.carray(_pointer(address, np.int32(0)), (1,))  # type: ignore[call-arg]


@nb.njit(inline="always")
def _i64(address):
    return nb.carray(_pointer(address, np.int64(0)), (1,))  # type: ignore[call-arg]


@nb.njit(inline="always")
def _lookup(keys, values, mask, key):
    at = (key * np.int64(0x9E3779B97F4A7C1) >> 20) & mask
    while True:
        found = keys[at]
        if found == key:
            return values[at]
        if found == -1:
            return np.int32(-1)
        at = (at + 1) & mask


@nb.njit(cache=True)
def hash_find(keys, values, mask, key):
    return _lookup(keys, values, mask, key)


@nb.njit(cache=True)
def hash_insert(keys, values, mask, key, value):
    at = (key * np.int64(0x9E3779B97F4A7C1) >> 20) & mask
    while keys[at] != -1 and keys[at] != key:
        at = (at + 1) & mask
    keys[at] = key
    values[at] = value


@nb.njit(cache=True)
def hash_copy(old_keys, old_values, keys, values, mask):
    for i in range(len(old_keys)):
        if old_keys[i] != -1:
            hash_insert(keys, values, mask, old_keys[i], old_values[i])


@nb.njit(cache=True)
def _transition(control, s, aux, k, byte):
    delta = _i32(control[DELTA])
    ends = _i32(control[ENDS])
    final = _u8(control[FINAL])
    space = _u8(control[SPACE])
    counted = _u8(control[COUNTED])
    space_class = _u8(control[SPACE_CLASS])
    stack_frame = _i32(control[STACK_FRAME])
    stack_parent = _i32(control[STACK_PARENT])
    while True:
        cls = space_class[byte]
        if cls > 0 and space[s] > 0:
            at = aux if aux > 0 else np.int64(space[s])
            aux2 = np.int64(_u8(control[SPACE_DELTA])[at * 8 + cls])
            if aux2 > 0:
                return OK, s, aux2, k
        code = delta[s * 256 + byte]
        if code > 0:
            count = counted[s]
            if count == 1:
                frame = stack_frame[k]
                if np.int64(_i32(control[STACK_DEPTH])[k]) < control[LOWEST]:
                    control[LOWEST] = _i32(control[STACK_DEPTH])[k]
                if byte == 34:
                    if aux < _i64(control[FRAME_LOW])[frame]:
                        return DEAD, s, aux, k
                elif aux >= _i64(control[FRAME_HIGH])[frame]:
                    return DEAD, s, aux, k
            if code >= PUSH:
                top = control[SCRATCH]
                if top >= control[STACK_LIMIT]:
                    return FULL, s, aux, k
                stack_frame[top] = _i32(control[ACT_FRAME])[code - PUSH]
                stack_parent[top] = k
                _i32(control[STACK_DEPTH])[top] = _i32(control[STACK_DEPTH])[k] + 1
                control[SCRATCH] = top + 1
                k = top
                s = np.int64(_i32(control[ACT_STATE])[code - PUSH])
                aux = np.int64(0)
            else:
                s = np.int64(code)
                if count > 0 and counted[s] > 0:
                    if counted[s] == 1:
                        frame = stack_frame[k]
                        if aux < _i64(control[FRAME_LOW])[frame] or _i64(control[FRAME_HIGH])[frame] < UNBOUNDED:
                            aux += 1  # without an upper bound there is nothing to count past the lower one
                else:
                    aux = np.int64(0)
            break
        if code == UNKNOWN:
            control[MISS_A] = s
            control[MISS_B] = byte if _u8(control[LAZY])[s] != 0 else 0
            return MISS_ROW, s, aux, k
        if ends[s] == 0:
            return DEAD, s, aux, k
        depth = np.int64(_i32(control[STACK_DEPTH])[k])
        if depth < control[LOWEST]:
            control[LOWEST] = depth
        key = np.int64(stack_frame[k]) << 32 | np.int64(ends[s] - 1)
        to = _lookup(_i64(control[HASH_KEYS]), _i32(control[HASH_VALUES]), control[HASH_MASK], key)
        if to < 0:
            control[MISS_A] = stack_frame[k]
            control[MISS_B] = ends[s] - 1
            return MISS_AFTER, s, aux, k
        if to == EXITED:
            control[MISS_B] = ends[s] - 1
            return EXIT, s, aux, k
        k = np.int64(stack_parent[k])
        aux = np.int64(0)
        if to == 0:
            return DEAD, s, aux, k
        if to >= PUSH:
            top = control[SCRATCH]
            if top >= control[STACK_LIMIT]:
                return FULL, s, aux, k
            stack_frame[top] = _i32(control[ACT_FRAME])[to - PUSH]
            stack_parent[top] = k
            _i32(control[STACK_DEPTH])[top] = _i32(control[STACK_DEPTH])[k] + 1
            control[SCRATCH] = top + 1
            k = top
            s = np.int64(_i32(control[ACT_STATE])[to - PUSH])
        else:
            s = np.int64(to)
    while final[s] != 0:
        depth = np.int64(_i32(control[STACK_DEPTH])[k])
        if depth < control[LOWEST]:
            control[LOWEST] = depth
        key = np.int64(stack_frame[k]) << 32 | np.int64(ends[s] - 1)
        to = _lookup(_i64(control[HASH_KEYS]), _i32(control[HASH_VALUES]), control[HASH_MASK], key)
        if to < 0:
            control[MISS_A] = stack_frame[k]
            control[MISS_B] = ends[s] - 1
            return MISS_AFTER, s, aux, k
        if to == EXITED:
            control[MISS_B] = ends[s] - 1
            return EXIT_AFTER, s, aux, k
        k = np.int64(stack_parent[k])
        aux = np.int64(0)
        if to == 0:
            return DEAD, s, aux, k
        if to >= PUSH:
            top = control[SCRATCH]
            if top >= control[STACK_LIMIT]:
                return FULL, s, aux, k
            stack_frame[top] = _i32(control[ACT_FRAME])[to - PUSH]
            stack_parent[top] = k
            _i32(control[STACK_DEPTH])[top] = _i32(control[STACK_DEPTH])[k] + 1
            control[SCRATCH] = top + 1
            k = top
            s = np.int64(_i32(control[ACT_STATE])[to - PUSH])
        else:
            s = np.int64(to)
    filter_at = _i64(control[FRAME_FILTER])[stack_frame[k]]
    if filter_at >= 0:
        depth = np.int64(_i32(control[STACK_DEPTH])[k])
        if depth < control[LOWEST]:
            control[LOWEST] = depth
        if _u8(control[FILTERS])[filter_at + _i32(control[LOCAL])[s]] == 0:
            return DEAD, s, aux, k
    return OK, s, aux, k


@nb.njit(cache=True)
def step_token(control, token, start, s, aux, k):
    """Follow a token's bytes from byte ``start``. Returns the status and the byte it stands at."""
    data = _u8(control[TOKEN_BYTES])
    offsets = _i64(control[TOKEN_OFFSETS])
    at = offsets[token] + start
    end = offsets[token + 1]
    status = OK
    while at < end:
        status, s2, aux2, k2 = _transition(control, s, aux, k, np.int64(data[at]))
        if status != OK:
            break
        s, aux, k = s2, aux2, k2
        at += 1
    control[OUT_STATE] = s
    control[OUT_AUX] = aux
    control[OUT_STACK] = k
    return status, at - offsets[token]


@nb.njit(cache=True)
def step_bytes(control, data, start, s, aux, k):
    """As ``step_token``, for bytes given."""
    at = start
    status = OK
    while at < len(data):
        status, s2, aux2, k2 = _transition(control, s, aux, k, np.int64(data[at]))
        if status != OK:
            break
        s, aux, k = s2, aux2, k2
        at += 1
    control[OUT_STATE] = s
    control[OUT_AUX] = aux
    control[OUT_STACK] = k
    return status, at


@nb.njit(cache=True)
def only_byte(control, s, aux, k):
    """The one byte that may follow; -1 if there are more or none, -2 if an entry is missing."""
    found = -1
    for byte in range(256):
        mark = control[SCRATCH]
        status, _, _, _ = _transition(control, s, aux, k, np.int64(byte))
        control[SCRATCH] = mark
        if status == OK:
            if found >= 0:
                return -1, 0
            found = byte
        elif status != DEAD:
            return -2, status
    return found, 0


@nb.njit(cache=True)
def enter_exits(exits, results, states, stacks, out):
    """Turn exits into regions of ``walk_trie``, given where each result leads; returns their number."""
    n = 0
    for i in range(len(exits)):
        for r in range(len(results)):
            if results[r] == exits[i, 1]:
                if states[r] != 0:
                    out[n, 0] = exits[i, 0]
                    out[n, 1] = states[r]
                    out[n, 2] = 0
                    out[n, 3] = stacks[r]
                    out[n, 4] = exits[i, 2]
                    n += 1
                break
    return n


@nb.njit(cache=True)
def distinct_results(exits, num_exits, out):
    """The different results of some exits, in order of appearance; returns their number."""
    n = 0
    for i in range(num_exits):
        known = False
        for r in range(n - 1, -1, -1):
            if out[r] == exits[i, 1]:
                known = True
                break
        if not known:
            out[n] = exits[i, 1]
            n += 1
    return n


@nb.njit(cache=True)
def walk_trie(control, trie, pending, num_pending, out, wanted, exits, num_exits, state_at, aux_at, stack_at):
    """Walk the regions in ``pending`` [n, 5] (node, state, aux, stack, taken) and set the mask's bits.

    A region is a node's subtree, entered in the configuration before the node's byte, or after it where ``taken``.
    A first region of node -1 is the whole trie. Where something is missing goes to ``out`` [capacity, 5], what is
    missing to ``wanted`` [capacity, 3] (kind, a, b), each once; where a barrier is popped to ``exits`` [capacity, 3]
    (node, result, taken). Returns the numbers of entries of the three, -1 first if one is too short.
    """
    node_byte = _u8(trie[T_BYTE])
    depths = _i32(trie[T_DEPTH])
    ends = _i32(trie[T_END])
    first = _i32(trie[T_FIRST])
    count = _i32(trie[T_COUNT])
    order = _i32(trie[T_ORDER])
    mask = _i32(control[MASK])
    num_out = 0
    num_wanted = 0
    for p in range(num_pending):
        node = pending[p, 0]
        at = max(node, 0)
        end = trie[T_NODES] if node < 0 else np.int64(ends[at])
        if at >= end:
            continue
        base = np.int64(depths[at]) - 1
        if pending[p, 4] != 0:
            for i in range(first[at], first[at] + count[at]):
                token = order[i]
                mask[token >> 5] |= np.int32(1) << np.int32(token & 31)
            at += 1
            base += 1
        state_at[base] = pending[p, 1]
        aux_at[base] = pending[p, 2]
        stack_at[base] = pending[p, 3]
        while at < end:
            d = np.int64(depths[at])
            status, s, aux, k = _transition(
                control, state_at[d - 1], aux_at[d - 1], stack_at[d - 1], np.int64(node_byte[at])
            )
            if status == OK:
                state_at[d] = s
                aux_at[d] = aux
                stack_at[d] = k
                for i in range(first[at], first[at] + count[at]):
                    token = order[i]
                    mask[token >> 5] |= np.int32(1) << np.int32(token & 31)
                at += 1
                continue
            if status in (EXIT, EXIT_AFTER):
                if num_exits >= len(exits):
                    return -1, 0, 0
                exits[num_exits, 0] = at
                exits[num_exits, 1] = control[MISS_B]
                exits[num_exits, 2] = 1 if status == EXIT_AFTER else 0
                num_exits += 1
            elif status != DEAD:
                if num_out >= len(out):
                    return -1, 0, 0
                out[num_out, 0] = at
                out[num_out, 1] = state_at[d - 1]
                out[num_out, 2] = aux_at[d - 1]
                out[num_out, 3] = stack_at[d - 1]
                out[num_out, 4] = 0
                num_out += 1
                b = control[MISS_B]
                known = False
                for w in range(num_wanted - 1, -1, -1):
                    if wanted[w, 1] == control[MISS_A] and wanted[w, 2] == b and wanted[w, 0] == status:
                        known = True
                        break
                if not known and num_wanted < len(wanted):
                    wanted[num_wanted, 0] = status
                    wanted[num_wanted, 1] = control[MISS_A]
                    wanted[num_wanted, 2] = b
                    num_wanted += 1
            at = np.int64(ends[at])
    return num_out, num_wanted, num_exits
