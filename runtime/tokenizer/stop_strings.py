"""Stop strings as one automaton: which stop string ends here, and how much of the text may still become one.

A. Aho, M. Corasick: Efficient string matching, 1975. A state is the longest suffix of the text so far that begins
some stop string; its depth is the number of characters that must be held back.
"""

from collections import deque


class StopStrings:
    """A state is a number, 0 at the start. A step costs one look-up, amortised, however many stop strings there are."""

    __slots__ = ("_fail", "_next", "depth", "match")

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]  # the longest stop string that ends at a state
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            child = self._next[state].get(char)
            if child is None:
                child = len(self._next)
                self._next[state][char] = child
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = child
        self.match[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char) if state else 0
                self.match[child] = self.match[child] or self.match[self._fail[child]]
                queue.append(child)
