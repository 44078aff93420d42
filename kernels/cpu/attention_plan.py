"""The plan of an attention: blocks of queries, chunks of keys, and the tiles that rows share.

It is made of lengths and slots alone, and is an array of integers.
"""

from typing import NamedTuple

from .attention_tile import KEYS
from .entry import entry
from .machine_code import helper, inlined
from .vector import get_i32, get_i64, put_i64

CHUNK = 512  # keys of a task
_TILES = CHUNK // KEYS

# A plan is int64 words:
#   the header;
#   for each block its fields;
#   for each block and KV head how many of its chunks are finished;
#   for each row the words of _Rows;
#   the runs.
#
# A run is the part of one chunk that some rows share: pieces, computed one after another by one task of each KV head. A
# piece is some neighbouring tiles and its members, the blocks of the rows with these tiles in the same slots:
#
#     tiles of a chunk    0  1  2  3  4  5  6  7
#     row A               [ piece  ][ piece  ] own
#     row B               [        ][        ] own, another slot in tile 6
#     row C               [        ] own, from tile 3 on
#
# A row that leaves within a chunk goes on with its own tiles from its sums so far, in the order in which it would
# compute all of them alone.
NUM_BLOCKS, NUM_TASKS, NUM_PARTS, WORK, NUM_SHARED, RUNS, HEADER = 0, 1, 2, 3, 4, 5, 6
ROW, BEGIN, END, FIRST_CHUNK, CHUNKS, FIRST_TASK, FIRST_PART, OWN = 0, 1, 2, 3, 4, 5, 6, 7
SHARED_TILES, LAST_RUN, FIELDS = 8, 9, 10  # of the row; the address of the run after which it goes on
RUN_LEN, PIECES, DONE = 0, 1, 2  # words to the next run; then for each KV head whether it is done; then the pieces
FIRST_TILE, END_TILE, MEMBERS, PIECE_FIELDS = 0, 1, 2, 3


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
    """Cuts the rows' queries into blocks, counts each block's chunks, and finds the tiles that rows share."""
    starts, kv_lens, num_rows, num_kv_heads = call.starts, call.kv_lens, call.num_rows, call.num_kv_heads
    group, block, head_dim, window, plan = call.group, call.block, call.head_dim, call.window, call.plan
    ends, firsts = call.ends, call.firsts
    num_blocks = 0
    for row in range(num_rows):
        queries = get_i32(starts, row + 1) - get_i32(starts, row)
        num_blocks += (queries + block - 1) // block
    rows = plan + 8 * (HEADER + num_blocks * (FIELDS + num_kv_heads))
    runs = rows + 8 * _ROW_WORDS * num_rows
    num_runs = _find_shared(call, rows, runs)
    blocks = tasks = parts = work = 0
    for row in range(num_rows):
        begin, end = get_i32(starts, row), get_i32(starts, row + 1)
        before = get_i32(kv_lens, row) - end  # position of query t: before + t
        shared_tiles = get_i64(rows, _ROW_WORDS * row + _SHARED)
        together = shared_tiles // _TILES
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
            put_i64(plan, at + SHARED_TILES, shared_tiles)
            put_i64(plan, at + LAST_RUN, get_i64(rows, _ROW_WORDS * row + _RUN))
            blocks += 1
            tasks += (chunks - together) * num_kv_heads
            if chunks > 1 or shared_tiles > 0:
                parts += chunks * num_kv_heads
            work += (end_key - first_key) * num_kv_heads * head_dim * (4 + (last - first) * group)
    put_i64(plan, NUM_BLOCKS, blocks)
    put_i64(plan, NUM_TASKS, tasks + num_runs * num_kv_heads)
    put_i64(plan, NUM_PARTS, parts)
    put_i64(plan, WORK, work)
    put_i64(plan, NUM_SHARED, num_runs * num_kv_heads)
    put_i64(plan, RUNS, runs)
    for i in range(blocks * num_kv_heads):
        put_i64(plan, HEADER + blocks * FIELDS + i, 0)


# Of a row: its block; how many tiles may be shared; how many are, and the last run that it is in. Then, while a run is
# planned: the first row of its root, of its piece and of its next piece, and the first tile of the piece that it leads.
_BLOCK, _TILES_BEFORE, _SHARED, _RUN, _ROOT, _PIECE, _NEXT, _SINCE, _ROW_WORDS = 0, 1, 2, 3, 4, 5, 6, 7, 8
_ALONE = -1


def plan_words(num_rows: int, num_tokens: int, table_width: int, *, block: int, num_kv_heads: int) -> int:
    """The most words of a plan."""
    max_blocks = num_rows + num_tokens // block
    tiles, chunks = table_width // KEYS, -(-table_width // CHUNK)
    # A run or a piece has two rows or more, and a row is in one piece at a time.
    runs = num_rows * (tiles * (1 + PIECE_FIELDS) + chunks * (DONE + num_kv_heads))
    return HEADER + max_blocks * (FIELDS + num_kv_heads) + num_rows * _ROW_WORDS + runs


@helper
def _find_shared(call: PlanCall, rows: int, runs: int) -> int:
    """Finds the tiles that rows share from their first on, and writes the runs; returns their number.

    Only tiles before a row's first query count, and only rows of one block.
    """
    starts, num_rows, block = call.starts, call.num_rows, call.block
    first_block = most_tiles = 0
    for row in range(num_rows):
        queries = get_i32(starts, row + 1) - get_i32(starts, row)
        at, tiles = rows + 8 * _ROW_WORDS * row, 0
        if call.window == 0 and call.firsts == 0 and 0 < queries <= block:
            tiles = _num_before(call, row) // KEYS
        put_i64(at, _BLOCK, first_block)
        put_i64(at, _TILES_BEFORE, tiles)
        put_i64(at, _SHARED, 0)
        put_i64(at, _RUN, 0)
        first_block += (queries + block - 1) // block
        most_tiles = max(most_tiles, tiles)
    count, run = 0, runs
    for first_tile in range(0, most_tiles, _TILES):
        before = count
        for row in range(num_rows):
            _find_root(call, rows, row, first_tile)
        for root in range(num_rows):
            at = rows + 8 * _ROW_WORDS * root
            if get_i64(at, _ROOT) == root and get_i64(at, _SINCE) > 1:
                run = _plan_run(call, rows, root, first_tile, run)
                count += 1
        if count == before:
            break
    return count


@helper
def _find_root(call: PlanCall, rows: int, row: int, tile: int) -> None:
    """Sets a row's root in the run that begins at ``tile``: the first row with this tile whose run has room for it.

    Of a root, ``_SINCE`` counts the rows and ``_NEXT`` the queries.
    """
    at = rows + 8 * _ROW_WORDS * row
    put_i64(at, _ROOT, _ALONE)
    if get_i64(at, _TILES_BEFORE) <= tile or get_i64(at, _SHARED) < tile:
        return
    queries = get_i32(call.starts, row + 1) - get_i32(call.starts, row)
    for root in range(row):
        other = rows + 8 * _ROW_WORDS * root
        if get_i64(other, _ROOT) != root or get_i64(other, _NEXT) + queries > call.most_queries:
            continue
        if _is_equal(call, row, root, tile):
            put_i64(at, _ROOT, root)
            put_i64(other, _SINCE, get_i64(other, _SINCE) + 1)
            put_i64(other, _NEXT, get_i64(other, _NEXT) + queries)
            return
    put_i64(at, _ROOT, row)
    put_i64(at, _SINCE, 1)
    put_i64(at, _NEXT, queries)


@helper
def _plan_run(call: PlanCall, rows: int, root: int, first_tile: int, run: int) -> int:
    """Writes the run of ``root`` to ``run``; returns the address behind it."""
    num_rows, num_kv_heads, step = call.num_rows, call.num_kv_heads, 8 * _ROW_WORDS
    pieces, to = 0, run + 8 * (DONE + num_kv_heads)
    for head in range(num_kv_heads):
        put_i64(run, DONE + head, 0)
    for row in range(root, num_rows):
        if get_i64(rows + step * row, _ROOT) == root:
            put_i64(rows + step * row, _PIECE, root)
            put_i64(rows + step * row, _RUN, run)
    put_i64(rows + step * root, _SINCE, first_tile)
    for tile in range(first_tile + 1, first_tile + _TILES + 1):
        for row in range(root, num_rows):
            if get_i64(rows + step * row, _ROOT) == root and get_i64(rows + step * row, _PIECE) != _ALONE:
                _find_next(call, rows, root, row, tile, tile == first_tile + _TILES)
        for leader in range(root, num_rows):
            at = rows + step * leader
            if get_i64(at, _ROOT) != root or get_i64(at, _PIECE) != leader or not _changes(rows, leader, num_rows):
                continue
            put_i64(to, FIRST_TILE, get_i64(at, _SINCE))
            put_i64(to, END_TILE, tile)
            members = 0
            for row in range(leader, num_rows):
                member = rows + step * row
                if get_i64(member, _ROOT) == root and get_i64(member, _PIECE) == leader:
                    put_i64(to, PIECE_FIELDS + members, get_i64(member, _BLOCK))
                    put_i64(member, _SHARED, tile)
                    put_i64(member, _SINCE, tile)
                    members += 1
            put_i64(to, MEMBERS, members)
            to += 8 * (PIECE_FIELDS + members)
            pieces += 1
        for row in range(root, num_rows):
            at = rows + step * row
            if get_i64(at, _ROOT) == root and get_i64(at, _PIECE) != _ALONE:
                put_i64(at, _PIECE, get_i64(at, _NEXT))
    put_i64(run, PIECES, pieces)
    put_i64(run, RUN_LEN, (to - run) // 8)
    return to


@helper
def _find_next(call: PlanCall, rows: int, root: int, row: int, tile: int, is_end: bool) -> None:
    """Sets the leader of a row's next piece: the first row of its piece with the same slots in ``tile``, if there are
    two or more.
    """
    step = 8 * _ROW_WORDS
    at = rows + step * row
    put_i64(at, _NEXT, _ALONE)
    if is_end or get_i64(at, _TILES_BEFORE) <= tile:
        return
    for leader in range(root, row):
        other = rows + step * leader
        if get_i64(other, _ROOT) != root or get_i64(other, _PIECE) != get_i64(at, _PIECE):
            continue
        if get_i64(other, _TILES_BEFORE) <= tile or not _is_equal(call, row, leader, tile):
            continue
        put_i64(other, _NEXT, leader)  # the first such row was alone until now, or leads already
        put_i64(at, _NEXT, leader)
        return


@helper
def _changes(rows: int, leader: int, num_rows: int) -> bool:
    """Whether the rows of a piece are not those of its next one."""
    root = get_i64(rows + 8 * _ROW_WORDS * leader, _ROOT)
    for row in range(leader, num_rows):
        at = rows + 8 * _ROW_WORDS * row
        is_member = get_i64(at, _ROOT) == root and get_i64(at, _PIECE) == leader
        if is_member and get_i64(at, _NEXT) != leader:
            return True
    return False


@inlined
def _num_before(call: PlanCall, row: int) -> int:
    """The keys that all queries of a row see, without the last one that the first query sees."""
    begin, end = get_i32(call.starts, row), get_i32(call.starts, row + 1)
    if call.ends != 0:
        return max(0, get_i32(call.ends, begin) - 1)
    return get_i32(call.kv_lens, row) - (end - begin)


@helper
def _is_equal(call: PlanCall, row: int, other: int, tile: int) -> bool:
    """Whether two rows have a tile in the same slots. Where they differ, the first 16 mostly do."""
    a = call.table + 4 * get_i32(call.row_ids, row) * call.table_step
    b = call.table + 4 * get_i32(call.row_ids, other) * call.table_step
    for i in range(tile * KEYS, (tile + 1) * KEYS, 16):
        differ = 0
        for j in range(i, i + 16):
            differ |= get_i32(a, j) ^ get_i32(b, j)
        if differ != 0:
            return False
    return True
