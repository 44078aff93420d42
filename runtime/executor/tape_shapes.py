"""The shapes of steps that run from tapes on a CPU: counts alone, for the executor and for the fleet's simulator."""

from collections.abc import Iterator

MAX_TOKENS = 512  # of a step, and of its tape; in larger steps the products take long and Python's share is small
MAX_ROWS = 32  # of a step with more tokens than that: attention's parts are laid out for rows as long as the table
MULTIPLE = 8  # of tokens in steps of more than MAX_ROWS
MANY_TOKENS, LARGE_MULTIPLE = 256, 16  # in steps of more than so many
FEW_ROWS = 8  # of one token, the usual ones
FEW_KEYS = 512  # read by all tokens of a step that follow another one of their row
StepShape = tuple[int, int]  # rows, tokens


def tape_shape(num_rows: int, num_tokens: int, *, longest: int, context: int) -> StepShape | None:
    """The shape of the tape of a step that needs each row's last logits; None where no tape is used.

    ``longest``: tokens of the longest row. ``context``: the most tokens that a row has after the step.
    """
    if not 0 < num_tokens <= MAX_TOKENS:
        return None
    if num_rows == num_tokens <= MAX_ROWS:
        return num_rows, num_tokens
    if num_tokens > MAX_ROWS:
        copies = num_copies(num_tokens)
        num_rows, num_tokens = num_rows + copies, num_tokens + copies
        if num_rows > MAX_ROWS:
            return None
    return padded_rows(num_rows, num_tokens, longest=longest, context=context), num_tokens


def usual_shapes(max_rows: int) -> Iterator[StepShape]:
    """Shapes of steps of up to ``max_rows`` sequences, the usual ones first: rows of one token and one row of several,
    then steps of more than MAX_ROWS tokens with a prompt, and steps of fewer tokens in several rows.
    """
    most = min(MAX_ROWS, max_rows)
    yield from ((n, n) for n in range(1, min(FEW_ROWS, most) + 1))
    yield from ((1, n) for n in range(2, MAX_ROWS + 1))
    yield from ((n, n) for n in range(FEW_ROWS + 1, most + 1))
    for num_rows in (1, 2, 4, 8, 16):  # copies of a token are rows too
        yield from ((num_rows, n) for n in range(MAX_ROWS + MULTIPLE, MANY_TOKENS + 1, MULTIPLE))
    if max_rows > 1:
        for together in (16, 8, 4, 2):
            yield from ((n + 1 - together, n) for n in range(together + 1, MAX_ROWS + 1))
    for num_rows in (1, 2, 4, 8, 16):
        yield from ((num_rows, n) for n in range(MANY_TOKENS + LARGE_MULTIPLE, MAX_TOKENS + 1, LARGE_MULTIPLE))


def num_copies(num_tokens: int) -> int:
    """Copies of a token that are added to a step of more than ``MAX_ROWS`` tokens, each as a row."""
    return -num_tokens % (LARGE_MULTIPLE if num_tokens > MANY_TOKENS else MULTIPLE)


def padded_rows(num_rows: int, num_tokens: int, *, longest: int, context: int) -> int:
    """Rows with padding: a number that many splits of as many tokens share.

    One row of up to MAX_ROWS tokens has none. In other steps of so few tokens the number of rows depends on the longest
    row, rounded down to a power of two, so that its tokens read the context's keys together; where they read few keys,
    there is one row a token. Steps of more than MAX_ROWS tokens have a power of two of rows, if the longest row leaves
    room for them.
    """
    if num_rows == 1 and num_tokens <= MAX_ROWS:
        return 1
    together = 1
    if num_tokens > MAX_ROWS or (num_tokens - num_rows) * context > FEW_KEYS:
        together = 1 << longest.bit_length() - 1
    most_rows = num_tokens + 1 - together
    return min(most_rows, 1 << (num_rows - 1).bit_length()) if num_tokens > MAX_ROWS else most_rows
