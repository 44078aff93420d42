"""The plan of an attention: blocks of queries, chunks of keys, and the chunks that rows share.

It is made of lengths and slots alone, and is an array of integers.
"""

from typing import NamedTuple

from .entry import entry
from .machine_code import helper, inlined
from .vector import get_i32, get_i64, put_i64

CHUNK = 512  # keys of a task

# A plan is int64 words:
#   the header;
#   for each block its fields;
#   for each block and KV head how many of its chunks are finished;
#   for each row its leader, then for each row how many chunks it shares with its leader;
#   for each shared piece its fields, then the blocks of its members.
NUM_BLOCKS, NUM_TASKS, NUM_PARTS, WORK, NUM_SHARED, SHARED, HEADER = 0, 1, 2, 3, 4, 5, 6
ROW, BEGIN, END, FIRST_CHUNK, CHUNKS, FIRST_TASK, FIRST_PART, OWN, FIELDS = 0, 1, 2, 3, 4, 5, 6, 7, 8
CHUNK_OF_PIECE, MEMBERS, PIECE_FIELDS = 0, 1, 2


class PlanCall(NamedTuple):
    starts: int  # int32 [R + 1]: the first query of each row
    kv_lens: int  # int32 [R]
    num_rows: int
    num_kv_heads: int
    group: int  # query heads of one KV head
    block: int  # queries of a block, at most
    head_dim: int
    window: int  # 0: none
    plan: int  # int64, written
    table: int  # int32 [rows, table_step]: the slots of each row's context
    table_step: int
    row_ids: int  # int32 [R]: the row of the table
    most_queries: int  # of a shared piece
    ends: int  # int32 [T]: how many keys of its row each query may see; 0: those up to its own
    firsts: int  # int32 [T]: the first of these; 0: the row's first, or what the window leaves


@entry
def plan_attention(call: PlanCall) -> None:
    """Cuts the rows' queries into blocks, counts each block's chunks, and finds the chunks that rows share."""
    starts, kv_lens, num_rows, num_kv_heads = call.starts, call.kv_lens, call.num_rows, call.num_kv_heads
    group, block, head_dim, window, plan = call.group, call.block, call.head_dim, call.window, call.plan
    ends, firsts = call.ends, call.firsts
    num_blocks = 0
    for row in range(num_rows):
        queries = get_i32(starts, row + 1) - get_i32(starts, row)
        num_blocks += (queries + block - 1) // block
    leaders = plan + 8 * (HEADER + num_blocks * (FIELDS + num_kv_heads))
    shared = leaders + 8 * num_rows
    _find_shared(call, leaders, shared)
    blocks = tasks = parts = work = 0
    for row in range(num_rows):
        begin, end = get_i32(starts, row), get_i32(starts, row + 1)
        before = get_i32(kv_lens, row) - end  # position of query t: before + t
        together = get_i64(shared, row)
        for first in range(begin, end, block):
            last = min(first + block, end)
            first_key = max(0, before + first - window + 1) if window > 0 else 0
            end_key = before + last
            if firsts != 0:
                first_key = get_i32(firsts, first)
            if ends != 0:
                end_key = get_i32(ends, last - 1)
            first_chunk = first_key // CHUNK
            chunks = (end_key - 1) // CHUNK - first_chunk + 1
            at = HEADER + blocks * FIELDS
            put_i64(plan, at + ROW, row)
            put_i64(plan, at + BEGIN, first)
            put_i64(plan, at + END, last)
            put_i64(plan, at + FIRST_CHUNK, first_chunk)
            put_i64(plan, at + CHUNKS, chunks)
            put_i64(plan, at + FIRST_TASK, tasks)
            put_i64(plan, at + FIRST_PART, parts)
            put_i64(plan, at + OWN, chunks - together)
            blocks += 1
            tasks += (chunks - together) * num_kv_heads
            if chunks > 1:
                parts += chunks * num_kv_heads
            work += (end_key - first_key) * num_kv_heads * head_dim * (4 + (last - first) * group)
    pieces = shared + 8 * num_rows
    num_pieces = _plan_pieces(plan, blocks, leaders, shared, pieces, call.most_queries)
    put_i64(plan, NUM_BLOCKS, blocks)
    put_i64(plan, NUM_TASKS, tasks + num_pieces * num_kv_heads)
    put_i64(plan, NUM_PARTS, parts)
    put_i64(plan, WORK, work)
    put_i64(plan, NUM_SHARED, num_pieces * num_kv_heads)
    put_i64(plan, SHARED, pieces)
    for i in range(blocks * num_kv_heads):
        put_i64(plan, HEADER + blocks * FIELDS + i, 0)


@helper
def _find_shared(call: PlanCall, leaders: int, shared: int) -> None:
    """Finds each row's leader, the first row with the same first chunk, and how many whole chunks they share.

    Only chunks before a row's first query count, and only rows of one block.
    """
    starts, num_rows, block, window = call.starts, call.num_rows, call.block, call.window
    table, table_step, row_ids = call.table, call.table_step, call.row_ids
    for row in range(num_rows):
        put_i64(leaders, row, row)
        put_i64(shared, row, 0)
    if window > 0 or call.firsts != 0:
        return
    for row in range(num_rows):
        queries = get_i32(starts, row + 1) - get_i32(starts, row)
        if queries > block or queries == 0:
            continue
        whole = _num_before(call, row) // CHUNK
        if whole == 0:
            continue
        own = table + 4 * get_i32(row_ids, row) * table_step
        for leader in range(row):
            if get_i64(leaders, leader) != leader:
                continue
            others = get_i32(starts, leader + 1) - get_i32(starts, leader)
            if others > block or others == 0:
                continue
            theirs = table + 4 * get_i32(row_ids, leader) * table_step
            most = min(whole, _num_before(call, leader) // CHUNK)
            together = 0
            while together < most and _is_equal(own, theirs, together * CHUNK):
                together += 1
            if together > 0:
                put_i64(leaders, row, leader)
                put_i64(shared, row, together)
                put_i64(shared, leader, max(together, get_i64(shared, leader)))
                break


@inlined
def _num_before(call: PlanCall, row: int) -> int:
    """The keys that all queries of a row see, without the last one that the first query sees."""
    begin, end = get_i32(call.starts, row), get_i32(call.starts, row + 1)
    if call.ends != 0:
        return max(0, get_i32(call.ends, begin) - 1)
    return get_i32(call.kv_lens, row) - (end - begin)


@helper
def _is_equal(a: int, b: int, first: int) -> bool:
    """Whether a chunk's slots are the same. Where they differ, the first 16 mostly do."""
    for i in range(first, first + CHUNK, 16):
        differ = 0
        for j in range(i, i + 16):
            differ |= get_i32(a, j) ^ get_i32(b, j)
        if differ != 0:
            return False
    return True


@helper
def _plan_pieces(plan: int, num_blocks: int, leaders: int, shared: int, pieces: int, most_queries: int) -> int:
    """Writes the pieces, each a shared chunk with members of at most ``most_queries`` queries; returns their number."""
    count, to = 0, 0
    for first in range(num_blocks):
        leader = get_i64(plan, HEADER + first * FIELDS + ROW)
        if get_i64(leaders, leader) != leader:
            continue
        for chunk in range(get_i64(shared, leader)):
            piece, queries = -1, 0
            for other in range(first, num_blocks):
                at = HEADER + other * FIELDS
                row = get_i64(plan, at + ROW)
                if get_i64(leaders, row) != leader or get_i64(shared, row) <= chunk:
                    continue
                more = get_i64(plan, at + END) - get_i64(plan, at + BEGIN)
                if piece < 0 or queries + more > most_queries:
                    piece, queries = to, 0
                    put_i64(pieces, piece + CHUNK_OF_PIECE, chunk)
                    put_i64(pieces, piece + MEMBERS, 0)
                    to += PIECE_FIELDS
                    count += 1
                put_i64(pieces, to, other)
                put_i64(pieces, piece + MEMBERS, get_i64(pieces, piece + MEMBERS) + 1)
                queries += more
                to += 1
    return count
