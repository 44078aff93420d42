"""Regular expressions for numbers between limits, in decimal digits without leading zeros or exponents."""

from __future__ import annotations

FLOAT = r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?"
_MAX_DIGITS = 18


def integer_pattern(low: int | None = None, high: int | None = None) -> str:
    """Matches exactly the integers from ``low`` to ``high``; a limit that is None is 18 digits."""
    most = 10**_MAX_DIGITS - 1
    low = -most if low is None else low
    high = most if high is None else high
    assert low <= high, (low, high)
    parts = []
    if low < 0:
        parts += ["-" + part for part in _natural(max(1, -high), -low)]
    if high >= 0:
        parts += _natural(max(0, low), high)
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


def _natural(low: int, high: int) -> list[str]:
    """Patterns that together match low..high, where 0 <= low <= high: one for each number of digits."""
    parts = []
    while low <= high:
        length = len(str(low))
        top = min(high, 10**length - 1)
        parts.append(_same_length(str(low), str(top)))
        low = top + 1
    return _merged(parts)


def _same_length(low: str, high: str) -> str:
    """Numbers of one length: their common prefix, then the two ends of the range, then the full decades between."""
    if low == high:
        return low
    length = len(low)
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return _digit(low[0], high[0]) + _digits(length - 1)
    if low[0] == high[0]:
        return low[0] + _group(_same_length(low[1:], high[1:]))
    parts = []
    first, last = int(low[0]), int(high[0])
    if set(low[1:]) != {"0"}:
        parts.append(low[0] + _group(_same_length(low[1:], "9" * (length - 1))))
        first += 1
    if set(high[1:]) != {"9"}:
        last -= 1
    if first <= last:
        parts.append(_digit(str(first), str(last)) + _digits(length - 1))
    if last < int(high[0]):
        parts.append(high[0] + _group(_same_length("0" * (length - 1), high[1:])))
    return "|".join(parts)


def _group(pattern: str) -> str:
    return f"({pattern})" if "|" in pattern else pattern


def _digit(low: str, high: str) -> str:
    return low if low == high else f"[{low}-{high}]"


def _digits(count: int) -> str:
    return "" if count == 0 else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"


def _merged(parts: list[str]) -> list[str]:
    """Join patterns of all numbers of adjacent lengths, ``[1-9][0-9]{3}|[1-9][0-9]{4}|...``, into one."""
    merged: list[str] = []
    run: list[int] = []

    def end_run() -> None:
        if len(run) == 1:
            merged.append("[1-9]" + _digits(run[0]))
        elif run:
            merged.append(f"[1-9][0-9]{{{run[0]},{run[-1]}}}")
        run.clear()

    for part in parts:
        whole = next((n for n in range(_MAX_DIGITS) if part == "[1-9]" + _digits(n)), None)
        if whole is None:
            end_run()
            merged.append(part)
        else:
            run.append(whole)
    end_run()
    return merged
