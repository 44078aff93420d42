"""Structural tags: free text until a tag begins, the tag's content, then free text again.

    {"tags": [{"begin": "<tool_call>", "schema": {...}, "end": "</tool_call>"}, ...],
     "triggers": ["<tool_call>"],        texts after which a tag has to follow (default: each tag's begin)
     "start_after": "</think>",          text before it is not constrained
     "at_least_one": false, "stop_after_first": false,
     "begin_at_once": false}            the text begins with a tag

A tag holds a JSON ``schema`` or a ``regex``, then ``end``. A regex ends at the first place where ``end`` can stand;
with an empty ``end`` it ends where the text no longer matches.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .expressions import EMPTY, NOTHING
from .machine import Machine
from .spec import GrammarError

MAX_TAGS = 512
FIELDS = {
    "tags": list,
    "triggers": list,
    "start_after": str,
    "at_least_one": bool,
    "stop_after_first": bool,
    "begin_at_once": bool,
}


@dataclass(frozen=True, slots=True)
class Tag:
    begin: str
    end: str
    schema: str | None
    regex: str | None


@dataclass(frozen=True, slots=True)
class TagSet:
    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    start_after: str
    at_least_one: bool
    stop_after_first: bool
    begin_at_once: bool


def read_tags(text: str) -> TagSet:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise GrammarError(f"structural tags are not JSON: {error}") from None
    if isinstance(data, list):
        data = {"tags": data}
    if not isinstance(data, dict):
        raise GrammarError("structural tags are an object with a list of tags")
    for key, value in data.items():
        if key not in FIELDS:
            raise GrammarError(f"unknown field {key!r}; there are {', '.join(FIELDS)}", where="#")
        if not isinstance(value, FIELDS[key]):
            raise GrammarError(f"{key} must be a {FIELDS[key].__name__}", where="#")
    tags = []
    for i, entry in enumerate(data.get("tags", ())):
        where = f"#/tags/{i}"
        if not isinstance(entry, dict) or not isinstance(entry.get("begin"), str) or not entry["begin"]:
            raise GrammarError("a tag needs begin, a text that is not empty", where=where)
        unknown = set(entry) - {"begin", "end", "schema", "regex"}
        if unknown:
            raise GrammarError(
                f"unknown field {sorted(unknown)[0]!r}; there are begin, end, schema, regex", where=where
            )
        if ("schema" in entry) == ("regex" in entry):
            raise GrammarError("a tag holds either a schema or a regex", where=where)
        if not isinstance(entry.get("end", ""), str) or not isinstance(entry.get("regex", ""), str):
            raise GrammarError("end and regex must be strings", where=where)
        schema = json.dumps(entry["schema"]) if "schema" in entry else None
        tags.append(Tag(entry["begin"], entry.get("end", ""), schema, entry.get("regex")))
    if not tags or len(tags) > MAX_TAGS:
        raise GrammarError(f"structural tags need 1 to {MAX_TAGS} tags, not {len(tags)}", where="#/tags")
    triggers = tuple(dict.fromkeys(data.get("triggers") or [tag.begin for tag in tags]))
    for trigger in triggers:
        if not isinstance(trigger, str) or not trigger or not any(tag.begin.startswith(trigger) for tag in tags):
            raise GrammarError(f"trigger {trigger!r} begins no tag", where="#/triggers")
        for other in triggers:
            if other in trigger[1:-1]:
                raise GrammarError(
                    f"trigger {trigger!r} can never appear: it contains the trigger {other!r}; shorten it",
                    where="#/triggers",
                )
    for i, tag in enumerate(tags):
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise GrammarError(f"no trigger begins {tag.begin!r}", where=f"#/tags/{i}")
        if any(other.begin != tag.begin and other.begin.startswith(tag.begin) for other in tags):
            raise GrammarError(f"{tag.begin!r} is also the beginning of another tag's begin", where=f"#/tags/{i}")
        if any(other.begin == tag.begin for other in tags[:i]):
            raise GrammarError(f"two tags begin with {tag.begin!r}", where=f"#/tags/{i}")
    return TagSet(
        tuple(tags),
        triggers,
        data.get("start_after", ""),
        data.get("at_least_one", False),
        data.get("stop_after_first", False),
        data.get("begin_at_once", False),
    )


class Tags:
    """The states of one set of tags.

    ``value_of(schema)`` is the state before a JSON value of a schema; ``regex_of(pattern, where)`` is an expression.
    """

    def __init__(
        self,
        tags: TagSet,
        machine: Machine,
        value_of: Callable[[str], int],
        regex_of: Callable[[str, str], int],
    ) -> None:
        self.tags = tags
        self.machine = machine
        self.ex = machine.expressions
        self._triggers = [t.encode() for t in tags.triggers]
        self._begins = [t.begin.encode() for t in tags.tags]
        self._contents: list[int] = []
        for i, tag in enumerate(tags.tags):
            if tag.schema is not None:
                try:
                    self._contents.append(value_of(tag.schema))
                except GrammarError as error:
                    raise error.within(f"#/tags/{i}/schema") from None
            else:
                language = self.ex.concat(
                    regex_of(tag.regex or "", f"#/tags/{i}/regex"), self.ex.literal(tag.end.encode())
                )
                if not self.ex.is_nonempty(language):
                    raise GrammarError("no text matches the regex", where=f"#/tags/{i}/regex")
                self._contents.append(self._embedded(language, has_end=bool(tag.end)))
        self.start = self._before(b"", EMPTY) if tags.start_after else self._first()

    def _first(self) -> int:
        """The state, or row code, from which tags may begin."""
        return self._beginning(b"") if self.tags.begin_at_once else self._free(b"", EMPTY, False)

    def _follow(self, waiting: list[bytes], seen: bytes) -> tuple[bytes, bool]:
        """The longest suffix of ``seen`` that one of ``waiting`` begins with, and whether it is a whole one."""
        for i in range(len(seen)):
            tail = seen[i:]
            if any(word.startswith(tail) for word in waiting):
                return tail, tail in waiting
        return b"", False

    def _text_step(self, rest: int, byte: int) -> int:
        """Free text is whole UTF-8 characters; ``rest`` is the expression of the current one's remaining bytes."""
        return self.ex.derive(self.ex.any_char if rest == EMPTY else rest, byte)

    def _before(self, seen: bytes, rest: int) -> int:
        """Text before ``start_after``."""
        machine = self.machine
        marker = self.tags.start_after.encode()

        def fill(row: np.ndarray) -> None:
            for byte in range(256):
                after = self._text_step(rest, byte)
                if after == NOTHING:
                    continue
                tail, is_whole = self._follow([marker], seen + bytes([byte]))
                row[byte] = self._first() if is_whole else self._before(tail, after)

        return machine.state((self, "before", seen, rest), lambda: machine.add_state(fill))

    def _free(self, seen: bytes, rest: int, had_one: bool) -> int:
        """Text in which a trigger may appear; ``seen`` is the part of one that the text ends with."""
        machine, tags = self.machine, self.tags
        may_end = had_one or not tags.at_least_one
        if had_one and tags.stop_after_first:
            return machine.state((self, "stopped"), lambda: machine.add_state(None, accepting=True))

        def fill(row: np.ndarray) -> None:
            for byte in range(256):
                after = self._text_step(rest, byte)
                if after == NOTHING:
                    continue
                tail, is_whole = self._follow(self._triggers, seen + bytes([byte]))
                row[byte] = self._beginning(tail) if is_whole else self._free(tail, after, had_one)

        return machine.state(
            (self, "free", seen, rest, had_one),
            lambda: machine.add_state(fill, accepting=may_end and rest == EMPTY),
        )

    def _beginning(self, seen: bytes) -> int:
        """The row code after a trigger: the rest of a tag's begin has to follow."""
        machine = self.machine
        if seen in self._begins:
            which = self._begins.index(seen)
            frame = machine.frame((self, which), lambda: machine.add_frame(lambda result: self._ended(which)))
            return machine.push(frame, self._contents[which])

        def fill(row: np.ndarray) -> None:
            for begin in self._begins:
                if begin.startswith(seen) and len(begin) > len(seen):
                    row[begin[len(seen)]] = self._beginning(begin[: len(seen) + 1])

        return machine.state((self, "beginning", seen), lambda: machine.add_state(fill))

    def _ended(self, which: int) -> int:
        """The state after a tag's content."""
        tag = self.tags.tags[which]
        rest = tag.end.encode() if tag.schema is not None else b""
        return self.machine.literal(rest, self._free(b"", EMPTY, True))

    def _embedded(self, expr: int, *, has_end: bool) -> int:
        """The state within a tag's regex and the ``end`` after it: it is left where that ``end`` can first stand."""
        ex, machine = self.ex, self.machine
        if has_end and ex.nullable[expr]:
            return machine.end_state(0)

        def fill(row: np.ndarray) -> None:
            for lo, hi, to in ex.steps(expr):
                row[lo:hi] = self._embedded(to, has_end=has_end)

        key = (self, "embedded", expr, has_end)
        return machine.state(
            key, lambda: machine.add_state(fill, ends=0 if ex.nullable[expr] else -1, final=expr == EMPTY)
        )
