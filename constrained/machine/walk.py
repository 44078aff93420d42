"""The compiled walks through a machine's tables: of one byte, of one token, of a whole trie.

The tables are passed as one int64 array of their addresses (``control``): a call costs 0.3 us, with fifteen arrays it
would cost 3 us. A walk that meets a missing entry notes it and skips the subtree; the caller makes the entry and
resumes the walk there.

    transition of (state, aux, stack) by a byte:
      white space where the state allows it     -> the white space automaton, held in aux
      another byte where it asks for more       -> refused
      delta[state, byte] = another state        -> go there
      delta[state, byte] >= PUSH                -> push a frame, go to its start
      delta[state, byte] < 0, the state may end -> pop: continue in after[frame, result] with the same byte
      delta[state, byte] < 0 otherwise          -> refused
"""

from typing import Any

import numba as nb
import numpy as np
from numba.core import types
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from ...cpu_isa import tell_numba
from ..native_code import brief_native, native, native_part

DEAD_STATE = 0
PUSH = 1 << 28
UNKNOWN, REFUSED, ASKED = 0, -1, -2  # row entries: missing; the byte is refused; missing, and the walk has noted it

# Slots of ``control``.
(
    DELTA, ENDS, FINAL, SPACE, LOCAL, COUNTED, ACT_FRAME, ACT_STATE, FRAME_FILTER, FRAME_LOW, FRAME_HIGH, FILTERS,
    HASH_KEYS, HASH_VALUES, HASH_MASK, STACK_FRAME, STACK_PARENT, STACK_DEPTH, STACK_LIMIT, SPACE_DELTA, SPACE_CLASS,
    TOKEN_BYTES, TOKEN_OFFSETS, TOKEN_KIND, LAZY, LOOPS, SCRATCH, MISS_A, MISS_B,
    STATE_AT, AUX_AT, STACK_AT, WANTED, WANTED_SIZE, EXITS, EXITS_SIZE, NUM_EXITS,
    ACCEPTING, NOTED, NOTED_SIZE, NUM_NOTED, CHARS_LEFT, NEEDS, PADDING, PENDING, OUT, ROOM,
    MASK, NUM_WORDS, END_TOKEN, KEPT, KEPT_KEYS, KEPT_AT, KEPT_SLOTS, NUM_KEPT, MAX_KEPT,
    SPARSE_OF, SPARSE, MISSING, NUM_STACKS, MAX_STACKS, STACK_TABLE, STACK_SLOTS, CONFIGS, NUM_CONFIGS, MAX_CONFIGS,
    CONFIG_TABLE, CONFIG_SLOTS, READS_ITEMS,
) = range(69)  # fmt: skip
CONTROL_SIZE = 69

# Columns of ``SPARSE``, whose rows are sets of states; see ``Machine.add_sparse_states``.
SP_FIRST, SP_BASE, SP_BEGINS, SP_MOVES = range(4)

# Slots of a trie's array of addresses.
(
    T_BYTE, T_DEPTH, T_END, T_FIRST, T_COUNT, T_ORDER, T_NODES,
    T_INSIDE, T_COVERED, T_COVERED_BEFORE, T_BOUNDARIES, T_BOUNDARIES_BEFORE, T_TOKENS,
    T_FIRST_NODES, T_FIRST_BYTES, T_NUM_FIRST,
) = range(16)  # fmt: skip
TRIE_SIZE = 16

SHORT_OF_REGIONS, SHORT_OF_EXITS, SHORT_OF_NOTES = -1, -2, -3  # the buffer that is full
SHORT_OF_RETURNS = -4  # what frames return is missing
NOT_KEPT, LACKS_AFTER = -1, -2
NOT_ALLOWED, NOT_KNOWN = -1, -2
NO_TEXT, TEXT, OPENING = range(3)  # kinds of tokens: an opening one may begin an array or object
OK, DEAD, MISS_ROW, MISS_AFTER, FULL, EXIT, EXIT_AFTER = range(7)
UNBOUNDED = 1 << 40  # the upper bound of a string without one
MAX_NEED = (1 << 16) - 2  # of ``NEEDS``; no string with a larger bound is counted
EXITED = 1 << 30  # what a barrier frame returns: the walk stops here and is continued for each real frame


def _pointer_to(kind: types.Type) -> Any:
    """``f(address)`` for compiled code: the numbers of this type at an int64 address. An index is never negative."""
    result = types.CPointer(kind)

    def pointer(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(result))

        return result(types.int64), codegen

    return intrinsic(pointer)


_u8, _u16, _u32, _u64 = (_pointer_to(kind) for kind in (types.uint8, types.uint16, types.uint32, types.uint64))
_i32, _i64 = _pointer_to(types.int32), _pointer_to(types.int64)

# Not literals: numba would compile what they are passed to once more for each.
_NONE, _ONE = np.int64(0), np.int64(1)


@nb.njit(inline="always")
def _words(control):
    """The mask under way, as an array: Python passes one to the same functions."""
    return nb.carray(_u32(control[MASK]), (control[NUM_WORDS],))


@nb.njit(inline="always")
def _regions(address, room):
    return nb.carray(_i64(address), (room, 5))


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


@native_part
def hash_insert(keys, values, mask, key, value):
    at = (key * np.int64(0x9E3779B97F4A7C1) >> 20) & mask
    while keys[at] != -1 and keys[at] != key:
        at = (at + 1) & mask
    keys[at] = key
    values[at] = value


@brief_native
def set_row(control, s, codes):
    """Move the codes [256] of a state to its row, 0 for a byte that is refused; missing bytes are refused too."""
    delta = _i32(control[DELTA])
    missing = _u8(control[MISSING])
    for byte in range(256):
        delta[s * 256 + byte] = REFUSED if missing[byte] != 0 or codes[byte] == 0 else codes[byte]
        codes[byte] = 0


@brief_native
def set_after(control, key, value):
    hash_insert(_i64(control[HASH_KEYS]), _i32(control[HASH_VALUES]), control[HASH_MASK], key, value)


@brief_native
def hash_copy(old_keys, old_values, keys, values, mask):
    for i in range(len(old_keys)):
        if old_keys[i] != -1:
            hash_insert(keys, values, mask, old_keys[i], old_values[i])


@nb.njit(inline="always")
def _push(control, action, parent):
    """The stack that the action puts on ``parent``; -1 if there is no room."""
    top = control[SCRATCH]
    if top >= control[STACK_LIMIT]:
        return np.int64(-1)
    _i32(control[STACK_FRAME])[top] = _i32(control[ACT_FRAME])[action]
    _i32(control[STACK_PARENT])[top] = parent
    _i32(control[STACK_DEPTH])[top] = _i32(control[STACK_DEPTH])[parent] + 1
    control[SCRATCH] = top + 1
    return top


@brief_native
def fill_sparse(control, s):
    """Write the row of a state whose number in ``SPARSE_OF`` is positive: that of the base state, but for the state's
    moves. The number is negative from then on. It is looked at before the row is: to read a page that was not written
    to would cost as much as to write to it."""
    delta = _i32(control[DELTA])
    missing = _u8(control[MISSING])
    sparse_of = _i32(control[SPARSE_OF])
    at = control[SPARSE] + 32 * (np.int64(sparse_of[s]) - 1)
    sparse_of[s] = -sparse_of[s]
    about = _i64(at)
    begins, moves = _i32(about[SP_BEGINS]), _i32(about[SP_MOVES])
    base = about[SP_BASE] * 256
    n = s - about[SP_FIRST]
    for byte in range(256):
        delta[s * 256 + byte] = delta[base + byte]
    for i in range(begins[n], begins[n + 1]):
        for byte in range(moves[3 * i], moves[3 * i + 1]):
            if missing[byte] == 0:
                delta[s * 256 + byte] = moves[3 * i + 2]


@native_part
def _transition(control, s, aux, k, byte):
    delta = _i32(control[DELTA])
    ends = _i32(control[ENDS])
    final = _u8(control[FINAL])
    space = _u16(control[SPACE])
    counted = _u8(control[COUNTED])
    space_class = _u8(control[SPACE_CLASS])
    stack_frame = _i32(control[STACK_FRAME])
    stack_parent = _i32(control[STACK_PARENT])
    sparse_of = _i32(control[SPARSE_OF])
    is_taken = False  # whether the byte has been taken; then only states that end their value at once are left
    while not is_taken or final[s] != 0:
        if not is_taken:
            if space[s] > 0:
                at = 8 * (aux if aux > 0 else np.int64(space[s]))
                cls = space_class[byte]
                aux2 = np.int64(_u16(control[SPACE_DELTA])[at + cls])
                if cls > 0 and aux2 > 0:
                    return OK, s, aux2, k
                if _u16(control[SPACE_DELTA])[at] == 0:
                    return DEAD, s, aux, k
            if sparse_of[s] > 0:
                fill_sparse(control, s)
            code = delta[s * 256 + byte]
            if code > 0:
                count = counted[s]
                if count == 1 and byte == 34:
                    frame = stack_frame[k]
                    if aux < _i64(control[FRAME_LOW])[frame]:
                        return DEAD, s, aux, k
                    if _i32(control[PADDING])[s] > _i64(control[FRAME_HIGH])[frame] - aux:
                        return DEAD, s, aux, k
                if code >= PUSH:
                    top = _push(control, code - PUSH, k)
                    if top < 0:
                        return FULL, s, aux, k
                    k = top
                    s = np.int64(_i32(control[ACT_STATE])[code - PUSH])
                    aux = np.int64(0)
                else:
                    s = np.int64(code)
                    if count > 0 and counted[s] > 0:
                        frame = stack_frame[k]
                        high = _i64(control[FRAME_HIGH])[frame]
                        if counted[s] == 1 and (aux < _i64(control[FRAME_LOW])[frame] or high < UNBOUNDED):
                            aux += 1  # without an upper bound, counting stops at the lower one
                        if _i32(control[CHARS_LEFT])[s] > high - aux:
                            return DEAD, s, aux, k
                    else:
                        aux = np.int64(0)
                is_taken = True
                continue
            if code in (UNKNOWN, ASKED):
                control[MISS_A] = s
                control[MISS_B] = byte if _u8(control[LAZY])[s] != 0 else 0
                return MISS_ROW, s, aux, k
            if ends[s] == 0:
                return DEAD, s, aux, k
        key = np.int64(stack_frame[k]) << 32 | np.int64(ends[s] - 1)
        to = _lookup(_i64(control[HASH_KEYS]), _i32(control[HASH_VALUES]), control[HASH_MASK], key)
        if to < 0:
            control[MISS_A] = stack_frame[k]
            control[MISS_B] = ends[s] - 1
            return MISS_AFTER, s, aux, k
        if to == EXITED:
            control[MISS_B] = ends[s] - 1
            return EXIT_AFTER if is_taken else EXIT, s, aux, k
        k = np.int64(stack_parent[k])
        aux = np.int64(0)
        if to == 0:
            return DEAD, s, aux, k
        if to >= PUSH:
            top = _push(control, to - PUSH, k)
            if top < 0:
                return FULL, s, aux, k
            k = top
            s = np.int64(_i32(control[ACT_STATE])[to - PUSH])
        else:
            s = np.int64(to)
    filter_at = _i64(control[FRAME_FILTER])[stack_frame[k]]
    if filter_at > 0 and _u8(control[FILTERS])[filter_at + _i32(control[LOCAL])[s]] == 0:
        return DEAD, s, aux, k
    return OK, s, aux, k


@brief_native
def step_token(control, token, start, s, aux, k):
    """Follow a token's bytes from byte ``start``.

    Returns the status, the index of the byte it stopped at, and the state, aux and stack before that byte.
    """
    offset = _i64(control[TOKEN_OFFSETS])[token]
    end = _i64(control[TOKEN_OFFSETS])[token + 1]
    data = _u8(control[TOKEN_BYTES])
    status, at, s, aux, k = _step_range(control, data, offset + start, end, s, aux, k)
    return status, at - offset, s, aux, k


@brief_native
def step_bytes(control, data, start, s, aux, k):
    """As ``step_token``, for the bytes ``data``."""
    return _step_range(control, data, start, len(data), s, aux, k)


@nb.njit(inline="always")
def _step_range(control, data, at, end, s, aux, k):
    control[SCRATCH] = control[NUM_STACKS]
    status = OK
    while at < end:
        status, s2, aux2, k2 = _transition(control, s, aux, k, np.int64(data[at]))
        if status != OK:
            break
        s, aux, k = s2, aux2, k2
        at += 1
    return status, at, s, aux, k


# -- stacks and configurations by number; ids are 1 more in their tables, which 0 says to be free ----------------------


@brief_native
def stack_of(control, frame, parent):
    """The number of a stack, a new one if there is none; -1 where there is no room for a new one."""
    frames, parents = _i32(control[STACK_FRAME]), _i32(control[STACK_PARENT])
    table, slots = _i32(control[STACK_TABLE]), control[STACK_SLOTS]
    slot = _mixed(np.uint64(frame), np.uint64(parent), np.uint64(0), np.uint64(0)) & slots
    while table[slot] > 0:
        found = np.int64(table[slot]) - 1
        if frames[found] == frame and parents[found] == parent:
            return found
        slot = (slot + 1) & slots
    number = control[NUM_STACKS]
    if number >= control[MAX_STACKS]:
        return np.int64(-1)
    frames[number] = frame
    parents[number] = parent
    depths = _i32(control[STACK_DEPTH])
    depths[number] = depths[parent] + 1
    table[slot] = number + 1
    control[NUM_STACKS] = number + 1
    return number


@brief_native
def config_of(control, s, aux, k, reading):
    """The number of a configuration, a new one if there is none; -1 where there is no room for a new one."""
    configs = _i64(control[CONFIGS])
    table, slots = _i32(control[CONFIG_TABLE]), control[CONFIG_SLOTS]
    slot = _mixed(np.uint64(s), np.uint64(aux), np.uint64(k), np.uint64(reading)) & slots
    while table[slot] > 0:
        at = 4 * (np.int64(table[slot]) - 1)
        if configs[at] == s and configs[at + 1] == aux and configs[at + 2] == k and configs[at + 3] == reading:
            return at >> 2
        slot = (slot + 1) & slots
    number = control[NUM_CONFIGS]
    if number >= control[MAX_CONFIGS]:
        return np.int64(-1)
    configs[4 * number], configs[4 * number + 1] = s, aux
    configs[4 * number + 2], configs[4 * number + 3] = k, reading
    table[slot] = number + 1
    control[NUM_CONFIGS] = number + 1
    return number


@nb.njit(inline="always")
def _mixed(a, b, c, d):
    prime = np.uint64(0x9E3779B97F4A7C15)
    key = (a * prime) ^ (a >> np.uint64(32))
    for part in (b, c, d):
        key = ((key ^ (key >> np.uint64(29))) + part) * prime
    return np.int64(key >> np.uint64(33))


@brief_native
def enter_all(control):
    """Write the numbers of all stacks and configurations into new tables."""
    frames, parents = _i32(control[STACK_FRAME]), _i32(control[STACK_PARENT])
    table, slots = _i32(control[STACK_TABLE]), control[STACK_SLOTS]
    for i in range(1, control[NUM_STACKS]):
        slot = _mixed(np.uint64(frames[i]), np.uint64(parents[i]), np.uint64(0), np.uint64(0)) & slots
        while table[slot] > 0:
            slot = (slot + 1) & slots
        table[slot] = i + 1
    configs = _u64(control[CONFIGS])
    table, slots = _i32(control[CONFIG_TABLE]), control[CONFIG_SLOTS]
    for i in range(control[NUM_CONFIGS]):
        slot = _mixed(configs[4 * i], configs[4 * i + 1], configs[4 * i + 2], configs[4 * i + 3]) & slots
        while table[slot] > 0:
            slot = (slot + 1) & slots
        table[slot] = i + 1


@brief_native
def advance(control, config, token):
    """The configuration after a token.

    NOT_ALLOWED where the token is refused, or is none of text; NOT_KNOWN where an entry or room is missing, or where
    readers have to see the token.
    """
    kind = _u8(control[TOKEN_KIND])[token]
    if kind == NO_TEXT:
        return np.int64(NOT_ALLOWED)
    configs = _i64(control[CONFIGS])
    if control[READS_ITEMS] != 0 and (kind == OPENING or configs[4 * config + 3] != 0):
        return np.int64(NOT_KNOWN)
    s, aux, k = configs[4 * config], configs[4 * config + 1], configs[4 * config + 2]
    begin, end = _i64(control[TOKEN_OFFSETS])[token], _i64(control[TOKEN_OFFSETS])[token + 1]
    kept = control[NUM_STACKS]
    status, _, s, aux, k = _step_range(control, _u8(control[TOKEN_BYTES]), begin, end, s, aux, k)
    if status != OK:
        return np.int64(NOT_ALLOWED if status == DEAD else NOT_KNOWN)
    if k >= kept:
        # Scratch entries become lasting ones from the lowest on, so none is overwritten before it is read.
        chain, count = _i64(control[STACK_AT]), 0
        while k >= kept:
            chain[count] = k
            count += 1
            k = np.int64(_i32(control[STACK_PARENT])[k])
        for i in range(count - 1, -1, -1):
            k = stack_of(control, np.int64(_i32(control[STACK_FRAME])[chain[i]]), k)
            if k < 0:
                return np.int64(NOT_KNOWN)
    found = config_of(control, s, aux, k, 0)
    return found if found >= 0 else np.int64(NOT_KNOWN)


@nb.njit(inline="always")
def _allow(mask, order, first, count):
    for i in range(first, first + count):
        token = order[i]
        mask[token >> 5] |= np.uint32(1) << np.uint32(token & 31)


@native
def walk_trie(control, trie, mask, pending, num_pending, out):
    """Walk the regions in ``pending`` [n, 5] (node, state, aux, stack, taken) and set the mask's bits.

    A region is a node's subtree. Its configuration is the one before the node's byte, or after it where ``taken``;
    node -1 is the whole trie. Written out:
      ``out`` [capacity, 5]: the regions where an entry was missing;
      ``WANTED`` [capacity, 3]: the missing entries (kind, a, b), each once;
      ``EXITS`` [capacity, 5]: where a barrier frame was popped (node, result, taken, characters counted before, their
      padding);
      ``NEEDS`` uint16 [V], unless it is 0: per allowed token, the characters of a counted string that it brings and
      that have to follow it;
      ``NOTED``: inner nodes that lead to an accepting state, unless ``NUM_NOTED`` is negative.
    Returns the numbers of regions and of missing entries. If a buffer is full, the first is ``SHORT_OF_...``.

    The nodes of first bytes lie far apart: of the whole trie only those are looked at whose byte the row takes.
    A state that loops (``LOOPS``) stays the same while text goes on within a string. Below a node that only text leads
    to, all tokens of nothing but text are allowed at once, and the walk continues at the nodes where text stops.
    """
    node_byte = _u8(trie[T_BYTE])
    depths = _i32(trie[T_DEPTH])
    ends = _i32(trie[T_END])
    first = _i32(trie[T_FIRST])
    count = _i32(trie[T_COUNT])
    order = _i32(trie[T_ORDER])
    has_slices = trie[T_INSIDE] != 0
    inside = _u8(trie[T_INSIDE])
    covered = _i32(trie[T_COVERED])
    covered_before = _i32(trie[T_COVERED_BEFORE])
    boundaries = _i32(trie[T_BOUNDARIES])
    boundaries_before = _i32(trie[T_BOUNDARIES_BEFORE])
    first_nodes = _i32(trie[T_FIRST_NODES])
    first_bytes = _u8(trie[T_FIRST_BYTES])
    space_class = _u8(control[SPACE_CLASS])
    delta = _i32(control[DELTA])
    sparse_of = _i32(control[SPARSE_OF])
    state_ends = _i32(control[ENDS])
    final = _u8(control[FINAL])
    space = _u16(control[SPACE])
    counted = _u8(control[COUNTED])
    stack_frame = _i32(control[STACK_FRAME])
    frame_filter = _i64(control[FRAME_FILTER])
    frame_low = _i64(control[FRAME_LOW])
    frame_high = _i64(control[FRAME_HIGH])
    filters = _u8(control[FILTERS])
    local = _i32(control[LOCAL])
    known_stack, filter_at, low, high = np.int64(-1), np.int64(0), np.int64(0), np.int64(0)
    accepting = _u8(control[ACCEPTING])
    noted = _i64(control[NOTED])
    num_noted = control[NUM_NOTED]
    loops = _u8(control[LOOPS])
    wanted = _i64(control[WANTED])
    has_needs = control[NEEDS] != 0
    needs = _u16(control[NEEDS])
    left = _i32(control[CHARS_LEFT])
    padding = _i32(control[PADDING])
    exits = _i64(control[EXITS])
    state_at = _i64(control[STATE_AT])
    aux_at = _i64(control[AUX_AT])
    stack_at = _i64(control[STACK_AT])
    num_out = 0
    num_wanted = 0
    num_exits = control[NUM_EXITS]
    for p in range(num_pending):
        node = pending[p, 0]
        at = max(node, 0)
        end = trie[T_NODES] if node < 0 else np.int64(ends[at])
        if at >= end:
            continue
        base = np.int64(depths[at]) - 1
        if pending[p, 4] != 0:
            _allow(mask, order, first[at], count[at])
            at += 1
            base += 1
        state_at[base] = pending[p, 1]
        aux_at[base] = pending[p, 2]
        stack_at[base] = pending[p, 3]
        # In a text slice: the next boundary, the last one, the end of the boundary being walked, the end of the slice.
        boundary, last_boundary, boundary_end, slice_end = np.int64(-1), np.int64(-1), np.int64(0), np.int64(0)
        slice_state, slice_aux, slice_stack = np.int64(0), np.int64(0), np.int64(0)
        next_first = np.int64(0) if node < 0 else np.int64(-1)  # of the whole trie, the first bytes still to come
        next_end = np.int64(0)  # where the subtree of the one before ends
        while at < end:
            if boundary >= 0 and at >= boundary_end:
                if boundary == last_boundary:
                    boundary = np.int64(-1)
                    at = slice_end
                    continue
                at = np.int64(boundaries[boundary])
                boundary += 1
                boundary_end = np.int64(ends[at])
                d = np.int64(depths[at])
                state_at[d - 1] = slice_state
                aux_at[d - 1] = slice_aux
                stack_at[d - 1] = slice_stack
            if next_first >= 0 and at >= next_end and boundary < 0:
                s = state_at[0]
                if sparse_of[s] > 0:
                    fill_sparse(control, s)
                while next_first < trie[T_NUM_FIRST]:
                    byte = np.int64(first_bytes[next_first])
                    if delta[s * 256 + byte] != REFUSED:
                        break
                    if counted[s] == 0 and (state_ends[s] != 0 or (space[s] != 0 and space_class[byte] != 0)):
                        break
                    next_first += 1
                if next_first == trie[T_NUM_FIRST]:
                    break
                at = np.int64(first_nodes[next_first])
                next_first += 1
                next_end = np.int64(first_nodes[next_first]) if next_first < trie[T_NUM_FIRST] else end
            d = np.int64(depths[at])
            s = state_at[d - 1]
            k = stack_at[d - 1]
            aux = np.int64(0)
            byte = np.int64(node_byte[at])
            if sparse_of[s] > 0:
                fill_sparse(control, s)
            code = np.int64(delta[s * 256 + byte])
            if k != known_stack:
                known_stack = k
                filter_at = frame_filter[stack_frame[k]]
                low, high = frame_low[stack_frame[k]], frame_high[stack_frame[k]]
            # Most steps stay within one lexeme and need the row alone; _transition handles the rest.
            if counted[s] != 0:
                if filter_at == 0 and 0 < code < PUSH and counted[code] != 0 and space[s] == 0:
                    aux = aux_at[d - 1]
                    s = code
                    if counted[s] == 1 and (aux < low or high < UNBOUNDED):
                        aux += 1
                    status = DEAD if left[s] > high - aux else OK
                elif code == REFUSED:
                    status = DEAD
                else:
                    status, s, aux, k = _transition(control, s, aux_at[d - 1], k, byte)
            elif space[s] != 0:
                status, s, aux, k = _transition(control, s, aux_at[d - 1], k, byte)
            elif 0 < code < PUSH and final[code] == 0:
                status = OK if filter_at == 0 or filters[filter_at + local[code]] != 0 else DEAD
                s = code
            elif code == REFUSED and state_ends[s] == 0:
                status = DEAD
            else:
                status, s, aux, k = _transition(control, s, aux_at[d - 1], k, byte)
            if status == OK:
                if has_slices and loops[s] != 0 and inside[at] != 0 and boundary < 0:
                    slice_end = np.int64(ends[at])
                    # covered_before has one entry more than there are nodes, so [slice_end] exists
                    _allow(mask, covered, covered_before[at], covered_before[slice_end] - covered_before[at])
                    boundary = np.int64(boundaries_before[at])
                    last_boundary = np.int64(boundaries_before[slice_end])
                    boundary_end = at
                    slice_state, slice_aux, slice_stack = s, aux, k
                    continue
                if num_noted >= 0 and accepting[s] != 0 and ends[at] > at + 1:
                    if num_noted >= control[NOTED_SIZE]:
                        return SHORT_OF_NOTES, num_wanted
                    noted[num_noted] = at
                    num_noted += 1
                state_at[d] = s
                aux_at[d] = aux
                stack_at[d] = k
                _allow(mask, order, first[at], count[at])
                if has_needs:
                    for i in range(first[at], first[at] + count[at]):
                        needs[order[i]] = np.uint16(max(min(aux + left[s], MAX_NEED), 0))
                at += 1
                continue
            if status in (EXIT, EXIT_AFTER):
                if num_exits >= control[EXITS_SIZE]:
                    return SHORT_OF_EXITS, num_wanted
                exits[5 * num_exits] = at
                exits[5 * num_exits + 1] = control[MISS_B]
                exits[5 * num_exits + 2] = 1 if status == EXIT_AFTER else 0
                exits[5 * num_exits + 3] = aux_at[d - 1]
                exits[5 * num_exits + 4] = padding[state_at[d - 1]]
                num_exits += 1
            elif status != DEAD:
                if num_out >= len(out):
                    return SHORT_OF_REGIONS, num_wanted
                out[num_out, 0] = at
                out[num_out, 1] = state_at[d - 1]
                out[num_out, 2] = aux_at[d - 1]
                out[num_out, 3] = stack_at[d - 1]
                out[num_out, 4] = 0
                num_out += 1
                a, b = control[MISS_A], control[MISS_B]
                known = False
                if status == MISS_ROW:
                    known = delta[a * 256 + b] == ASKED
                    if not known and num_wanted < control[WANTED_SIZE]:
                        delta[a * 256 + b] = ASKED
                else:
                    for w in range(3 * num_wanted - 3, -1, -3):
                        if wanted[w + 1] == a and wanted[w + 2] == b and wanted[w] == status:
                            known = True
                            break
                if not known and num_wanted < control[WANTED_SIZE]:
                    wanted[3 * num_wanted] = status
                    wanted[3 * num_wanted + 1] = a
                    wanted[3 * num_wanted + 2] = b
                    num_wanted += 1
            at = np.int64(ends[at])
    control[NUM_EXITS] = num_exits
    control[NUM_NOTED] = num_noted
    return num_out, num_wanted


@native
def walk_state(control, trie, mask, state, aux, stack, pending, out):
    """``walk_trie`` from a configuration on."""
    control[SCRATCH] = control[NUM_STACKS]
    control[NUM_EXITS] = 0
    pending[0, 0], pending[0, 1], pending[0, 2], pending[0, 3], pending[0, 4] = -1, state, aux, stack, 0
    return walk_trie(control, trie, mask, pending, _ONE, out)


@native
def walk_behind(control, trie, mask, exits, low, high, stack, pending, out):
    """``walk_trie`` behind the exits [n, 5] of a walk, where ``stack`` stands in the place of the barrier.

    Of a counted string, only the exits are taken that have at least ``low`` characters, and at most ``high`` with their
    padding. ``pending`` and ``out`` have room for n entries.
    Returns the numbers of regions, missing entries and exits taken; ``SHORT_OF_RETURNS`` where nothing was walked,
    because frames lack returns.
    """
    control[SCRATCH] = control[NUM_STACKS]
    control[NUM_EXITS] = 0
    wanted = _i64(control[WANTED])
    num_wanted = num_results = num_regions = _NONE
    for i in range(len(exits)):
        if exits[i, 3] < low or exits[i, 3] + exits[i, 4] > high:
            continue
        result = exits[i, 1]
        r = 0
        while r < num_results and out[r, 0] != result:
            r += 1
        if r == num_results:
            status, state, behind = _leave(control, stack, result)
            if status != OK and num_wanted < control[WANTED_SIZE]:
                wanted[3 * num_wanted] = status
                wanted[3 * num_wanted + 1] = control[MISS_A]
                wanted[3 * num_wanted + 2] = control[MISS_B]
                num_wanted += 1
            out[r, 0], out[r, 1], out[r, 2] = result, state, behind
            num_results += 1
        if out[r, 1] != DEAD_STATE:
            n = num_regions
            pending[n, 0], pending[n, 1], pending[n, 2] = exits[i, 0], out[r, 1], 0
            pending[n, 3], pending[n, 4] = out[r, 2], exits[i, 2]
            num_regions += 1
    if num_wanted > 0:
        return SHORT_OF_RETURNS, num_wanted, num_regions
    count, num_wanted = walk_trie(control, trie, mask, pending, num_regions, out)
    return count, num_wanted, num_regions


@nb.njit(inline="always")
def _leave(control, k, result):
    """The status, and the state and the stack after the top frame is popped with a result; state 0 if nothing may
    follow."""
    while True:
        frame = np.int64(_i32(control[STACK_FRAME])[k])
        to = _lookup(_i64(control[HASH_KEYS]), _i32(control[HASH_VALUES]), control[HASH_MASK], frame << 32 | result)
        if to < 0:
            control[MISS_A] = frame
            control[MISS_B] = result
            return MISS_AFTER, np.int64(DEAD_STATE), k
        k = np.int64(_i32(control[STACK_PARENT])[k])
        s = np.int64(to)
        if to >= PUSH:
            top = _push(control, to - PUSH, k)
            if top < 0:
                return FULL, np.int64(DEAD_STATE), k
            k = top
            s = np.int64(_i32(control[ACT_STATE])[to - PUSH])
        if s == DEAD_STATE or _u8(control[FINAL])[s] == 0:
            return OK, s, k
        result = np.int64(_i32(control[ENDS])[s] - 1)


@native
def mask_at(control, trie, state, aux, stack):
    """Make the mask under way that of a configuration: what ``walk_trie`` allows, and the end token.

    Returns the numbers of regions and of missing entries, as ``walk_trie``, and the number of the kept mask; that is
    NOT_KEPT where entries are missing, or no room is left.
    """
    mask = _words(control)
    for i in range(control[NUM_WORDS]):
        mask[i] = 0
    control[SCRATCH] = control[NUM_STACKS]
    control[NUM_EXITS] = 0
    pending, out = _regions(control[PENDING], control[ROOM]), _regions(control[OUT], control[ROOM])
    pending[0, 0], pending[0, 1], pending[0, 2], pending[0, 3], pending[0, 4] = -1, state, aux, stack, 0
    count, num_wanted = walk_trie(control, trie, mask, pending, _ONE, out)
    return count, num_wanted, keep_mask(control, state, aux, stack) if count == 0 else NOT_KEPT


@native
def mask_behind(control, trie, exits, low, high, state, aux, stack):
    """As ``mask_at``, where the mask under way is what a walk above a barrier allowed, and ``exits`` are its exits.

    The last of the numbers returned is that of the regions, as of ``walk_behind``.
    """
    mask = _words(control)
    count, num_wanted, num_regions = _NONE, _NONE, _NONE
    if len(exits) > 0:
        pending, out = _regions(control[PENDING], control[ROOM]), _regions(control[OUT], control[ROOM])
        count, num_wanted, num_regions = walk_behind(control, trie, mask, exits, low, high, stack, pending, out)
    return count, num_wanted, keep_mask(control, state, aux, stack) if count == 0 else NOT_KEPT, num_regions


@native
def mask_beside(control, trie, state, beside, stack):
    """As ``mask_at``, where the mask under way is that of the state ``beside`` on the same stack: only the nodes are
    walked at which the two states differ. The last of the numbers returned is that of the regions walked.

    The states are within a name, and the frame has no filter. Where both lead to states that go on, these are compared
    byte by byte.
    """
    node_byte = _u8(trie[T_BYTE])
    depths = _i32(trie[T_DEPTH])
    ends = _i32(trie[T_END])
    first = _i32(trie[T_FIRST])
    count = _i32(trie[T_COUNT])
    order = _i32(trie[T_ORDER])
    delta = _i32(control[DELTA])
    final = _u8(control[FINAL])
    state_ends = _i32(control[ENDS])
    sparse_of = _i32(control[SPARSE_OF])
    counted = _u8(control[COUNTED])
    state_at = _i64(control[STATE_AT])
    beside_at = _i64(control[AUX_AT])
    num_nodes = np.int64(trie[T_NODES])
    mask = _words(control)
    mask[control[END_TOKEN] >> 5] &= ~(np.uint32(1) << np.uint32(control[END_TOKEN] & 31))
    control[SCRATCH] = control[NUM_STACKS]
    control[NUM_EXITS] = 0
    room = control[ROOM]
    pending, out = _regions(control[PENDING], room), _regions(control[OUT], room)
    state_at[0], beside_at[0] = state, beside
    num_regions = _NONE
    first_nodes, first_bytes = _i32(trie[T_FIRST_NODES]), _u8(trie[T_FIRST_BYTES])
    next_first, next_end = np.int64(0), np.int64(0)
    for place in (state, beside):
        if sparse_of[place] > 0:
            fill_sparse(control, place)
    at = np.int64(0)
    while at < num_nodes:
        if at >= next_end:  # the nodes of first bytes lie far apart
            while next_first < trie[T_NUM_FIRST]:
                byte = np.int64(first_bytes[next_first])
                code = delta[state * 256 + byte]
                if code != delta[beside * 256 + byte]:
                    break
                if code <= 0 and (code != REFUSED or state_ends[state] != 0 or state_ends[beside] != 0):
                    break
                next_first += 1
            if next_first == trie[T_NUM_FIRST]:
                break
            at = np.int64(first_nodes[next_first])
            next_first += 1
            next_end = np.int64(first_nodes[next_first]) if next_first < trie[T_NUM_FIRST] else num_nodes
        d = np.int64(depths[at])
        s, t = state_at[d - 1], beside_at[d - 1]
        for place in (s, t):
            if sparse_of[place] > 0:
                fill_sparse(control, place)
        code, other = np.int64(delta[s * 256 + node_byte[at]]), np.int64(delta[t * 256 + node_byte[at]])
        if code == other and (code > 0 or (code == REFUSED and state_ends[s] == 0 and state_ends[t] == 0)):
            at = np.int64(ends[at])
            continue
        if 0 < code < PUSH and 0 < other < PUSH and final[code] + final[other] + counted[code] + counted[other] == 0:
            _allow(mask, order, first[at], count[at])
            state_at[d], beside_at[d] = code, other
            at += 1
            continue
        if num_regions == room:
            return SHORT_OF_REGIONS, np.int64(0), np.int64(NOT_KEPT), num_regions
        last = np.int64(first[ends[at]]) if ends[at] < num_nodes else np.int64(trie[T_TOKENS])
        for i in range(first[at], last):
            token = order[i]
            mask[token >> 5] &= ~(np.uint32(1) << np.uint32(token & 31))
        pending[num_regions, 0], pending[num_regions, 1], pending[num_regions, 2] = at, s, 0
        pending[num_regions, 3], pending[num_regions, 4] = stack, 0
        num_regions += 1
        at = np.int64(ends[at])
    short, num_wanted = walk_trie(control, trie, mask, pending, num_regions, out)
    kept = keep_mask(control, state, _NONE, stack) if short == 0 else NOT_KEPT
    return short, num_wanted, kept, num_regions


@native
def mask_again(control, trie, num_pending, state, aux, stack):
    """Walk on in the pending regions of a mask under way; returns as ``mask_at``."""
    pending, out = _regions(control[PENDING], control[ROOM]), _regions(control[OUT], control[ROOM])
    count, num_wanted = walk_trie(control, trie, _words(control), pending, num_pending, out)
    return count, num_wanted, keep_mask(control, state, aux, stack) if count == 0 else NOT_KEPT


@brief_native
def keep_mask(control, state, aux, stack):
    """Add the end token to the mask under way where the text may end. The number of the kept mask that is equal to it.

    NOT_KEPT where there is no room for another one; LACKS_AFTER where what a frame returns is missing.
    """
    mask = _u32(control[MASK])
    may_end = _may_end(control, state, aux, stack)
    if may_end < 0:
        return np.int64(LACKS_AFTER)
    token = control[END_TOKEN]
    if may_end:
        mask[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
    return _kept(control, mask)


@brief_native
def keep_as_it_is(control):
    """The number of the kept mask that is equal to the mask under way; NOT_KEPT where there is no room for another."""
    return _kept(control, _u32(control[MASK]))


@nb.njit(inline="always")
def _kept(control, mask):
    num_words = control[NUM_WORDS]
    prime = np.uint64(0x9E3779B97F4A7C15)
    a, b, c, d = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    i = 0
    while i + 4 <= num_words:
        a = (a ^ np.uint64(mask[i])) * prime
        b = (b ^ np.uint64(mask[i + 1])) * prime
        c = (c ^ np.uint64(mask[i + 2])) * prime
        d = (d ^ np.uint64(mask[i + 3])) * prime
        i += 4
    while i < num_words:
        a = (a ^ np.uint64(mask[i])) * prime
        i += 1
    key = a
    for part in (b, c, d):
        key = ((key ^ (key >> np.uint64(29))) + part) * prime
    key ^= key >> np.uint64(32)
    keys = _i64(control[KEPT_KEYS])
    places = _i32(control[KEPT_AT])
    slot = np.int64(key) & control[KEPT_SLOTS]
    kept = _u32(control[KEPT])
    while places[slot] >= 0:
        if keys[slot] == np.int64(key):
            begin = places[slot] * num_words
            differs = np.uint32(0)
            for i in range(num_words):
                differs |= kept[begin + i] ^ mask[i]
            if differs == 0:
                return np.int64(places[slot])
        slot = (slot + 1) & control[KEPT_SLOTS]
    number = control[NUM_KEPT]
    if number == control[MAX_KEPT]:
        return np.int64(NOT_KEPT)
    for i in range(num_words):
        kept[number * num_words + i] = mask[i]
    keys[slot], places[slot] = np.int64(key), number
    control[NUM_KEPT] = number + 1
    return number


@nb.njit(inline="always")
def _may_end(control, s, aux, k):
    """Whether the text may end in a configuration; -1 if what a frame returns is missing."""
    while True:
        if _u8(control[ACCEPTING])[s] != 0:
            return 1
        result = np.int64(_i32(control[ENDS])[s]) - 1
        if result < 0 or k == 0 or (aux > 0 and _u16(control[SPACE])[s] != 0):
            return 0
        frame = np.int64(_i32(control[STACK_FRAME])[k])
        to = _lookup(_i64(control[HASH_KEYS]), _i32(control[HASH_VALUES]), control[HASH_MASK], frame << 32 | result)
        if to < 0:
            control[MISS_A] = frame
            control[MISS_B] = result
            return -1
        if to >= PUSH:
            return 0  # another frame takes this one's place: the text goes on
        s = np.int64(to)
        k = np.int64(_i32(control[STACK_PARENT])[k])


@brief_native
def largest_need(needs):
    """The largest of ``needs`` uint16 [n] that is at most ``MAX_NEED``; 0 if there is none."""
    most = np.uint16(0)
    for need in needs:
        most = max(most, np.uint16(need + 1))  # what is above ``MAX_NEED`` becomes 0
    return max(np.int64(most) - 1, np.int64(0))


@brief_native
def allow_tokens(mask, tokens):
    for token in tokens:
        mask[token >> 5] |= np.uint32(1) << np.uint32(token & 31)


@brief_native
def regions_at(control, starts, nodes, state, out):
    """Make regions of ``walk_trie`` from those of ``nodes`` whose byte ``state`` takes, on the empty stack.

    ``nodes[starts[b]:starts[b + 1]]`` have byte b; the state's row is complete. Returns the number of regions.
    """
    delta = _i32(control[DELTA])
    n = 0
    for byte in range(256):
        if delta[state * 256 + byte] > 0:
            for i in range(starts[byte], starts[byte + 1]):
                out[n, 0] = nodes[i]
                out[n, 1] = state
                out[n, 2] = out[n, 3] = out[n, 4] = 0
                n += 1
    return n


# The kinds of ``steps_from``.
NEXT_STATE, LEFT, PUSHED, REPLACED = range(4)


@brief_native
def steps_from(control, s, aux, k, low, high, out):
    """The steps by a byte in [low, high); of neighbouring ones to the same place only the first. ``out`` [256, 4] has

        byte, NEXT_STATE, state, aux      within the value
        byte, LEFT, result, 0             the byte ends the value and pops a barrier frame
        byte, PUSHED, state, frame        to a state above a new frame
        byte, REPLACED, state, frame      to a state above a frame that took the place of the top one

    Returns their number, or ``-1 - status`` if an entry was missing.
    """
    stack_frame = _i32(control[STACK_FRAME])
    stack_parent = _i32(control[STACK_PARENT])
    n = 0
    for byte in range(low, high):
        status, s2, aux2, k2 = _transition(control, s, aux, k, np.int64(byte))
        if status == OK:
            if k2 == k:
                kind, a, b = NEXT_STATE, s2, aux2
            else:
                kind, a, b = PUSHED if stack_parent[k2] == k else REPLACED, s2, np.int64(stack_frame[k2])
        elif status == EXIT_AFTER:
            kind, a, b = LEFT, control[MISS_B], np.int64(0)
        elif status in (DEAD, EXIT):
            continue
        else:
            return -1 - status
        if n > 0 and out[n - 1, 1] == kind and out[n - 1, 2] == a and out[n - 1, 3] == b:
            continue
        out[n, 0], out[n, 1], out[n, 2], out[n, 3] = byte, kind, a, b
        n += 1
    return n


@native
def token_places(control, trie, mask, at, path, groups, places, num_places, table):
    """Where each token of ``mask`` leads: ``places[groups[token]]`` [n, 3] is its (state, aux, stack).

    ``path`` [depths, 3] holds the places on the way to node ``at``, from which the walk goes on; ``table`` finds equal
    places. Returns (node, number of places, status): the last node's successor and OK, or the node where an entry was
    missing, or where ``places`` was full (SHORT_OF_REGIONS).
    """
    node_byte = _u8(trie[T_BYTE])
    depths = _i32(trie[T_DEPTH])
    ends = _i32(trie[T_END])
    first = _i32(trie[T_FIRST])
    count = _i32(trie[T_COUNT])
    order = _i32(trie[T_ORDER])
    loops = _u8(control[LOOPS])
    slots = len(table) - 1
    while at < trie[T_NODES]:
        d = np.int64(depths[at])
        s, aux, k = path[d - 1, 0], path[d - 1, 1], path[d - 1, 2]
        byte = np.int64(node_byte[at])
        if loops[s] == 0 or byte < 0x20 or byte >= 0x80 or byte == 0x22 or byte == 0x5C:
            status, s, aux, k = _transition(control, s, aux, k, byte)
            if status == DEAD:
                at = np.int64(ends[at])
                continue
            if status != OK:
                return at, num_places, status
        path[d, 0], path[d, 1], path[d, 2] = s, aux, k
        group = -1
        for i in range(first[at], first[at] + count[at]):
            token = order[i]
            if mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1) == 0:
                continue
            if group < 0:
                slot = (s * 0x9E3779B1 + aux * 0x85EBCA6B + k * 0xC2B2AE35) & slots
                while table[slot] >= 0:
                    found = table[slot]
                    if places[found, 0] == s and places[found, 1] == aux and places[found, 2] == k:
                        break
                    slot = (slot + 1) & slots
                if table[slot] < 0:
                    if num_places >= len(places):
                        return at, num_places, SHORT_OF_REGIONS
                    table[slot] = num_places
                    places[num_places, 0], places[num_places, 1], places[num_places, 2] = s, aux, k
                    num_places += 1
                group = table[slot]
            groups[token] = group
        at += 1
    return at, num_places, OK


def are_on_disk() -> bool:
    """Whether numba has kept the longest walk, for this CPU and version of the code. True where it can keep nothing."""
    tell_numba()
    lines, table = types.int64[::1], types.int64[:, ::1]
    try:
        return _Kept(walk_trie.py_func).has((lines, lines, types.uint32[::1], table, types.int64, table))
    except RuntimeError:  # no folder that can be written
        return True


class _Kept(FunctionCache):
    """numba's cache of a function on disk."""

    def has(self, arguments: tuple[types.Type, ...]) -> bool:
        """Whether the code for arguments of these types is there."""
        key = self._index_key(arguments, cpu_target.target_context.codegen())
        return self._cache_file.load(key) is not None
