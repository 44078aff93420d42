"""Random programs, for tests that carry them from engine to engine."""

import random

from phloem.protocol import ops as o
from phloem.protocol.ops import AnyOp, GrammarSpec
from phloem.protocol.sampling import SamplingParams

GRAMMARS = [
    GrammarSpec("regex", "[a-z]{2,6} (yes|no)"),
    GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"enum": ["xy", 12]}}, "required": ["a"]}'),
]
WORDS = ["sap", "leaf ", "root", "Grüße ", "木", "42", " and ", "the "]


class RandomProgram:
    """``submits``: its ops in the parts in which they are sent. Sequence 0 is its first; every sequence is closed."""

    def __init__(self, rng: random.Random, *, num_parts: int = 3) -> None:
        self._rng = rng
        self._next_op = 0
        self._open = [0]
        self._next_seq = 1
        self._marks: dict[int, list[int]] = {0: []}
        self._sources: list[tuple[int, int]] = []  # (op with texts, its sequence)
        self.submits: list[list[AnyOp]] = []
        for _ in range(num_parts):
            self.submits.append([op for _ in range(rng.randrange(2, 6)) for op in self._some()])
        self.submits[-1] += [o.Close(op=self._id(), seq=seq) for seq in self._open]

    def _id(self) -> int:
        self._next_op += 1
        return self._next_op - 1

    def _text(self, seq: int) -> AnyOp:
        return o.Text(op=self._id(), seq=seq, text="".join(self._rng.choices(WORDS, k=self._rng.randrange(1, 5))))

    def _gen(self, seq: int) -> AnyOp:
        rng = self._rng
        grammar = rng.choice(GRAMMARS) if rng.random() < 0.25 else None
        max_tokens = rng.choice([0, 1, 5, 12, 25])
        params = SamplingParams(
            max_tokens=max_tokens,
            finish="cut" if max_tokens < 10 else "closed",  # the shortest text of a grammar has up to 8 tokens
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(1000),
            ignore_eos=rng.random() < 0.6,
            stop=("e", "on") if rng.random() < 0.2 else (),
            presence_penalty=rng.choice([0.0, 0.0, 0.7]),
            heal=rng.random() < 0.4,
            return_logprob=rng.random() < 0.2,
        )
        op = self._id()
        self._sources.append((op, seq))
        return o.Gen(
            op=op, seq=seq, params=params, grammar=grammar, n=rng.choice([1, 1, 1, 2]), stream=rng.random() < 0.7
        )

    def _some(self) -> list[AnyOp]:
        rng = self._rng
        seq = rng.choice(self._open)
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                return [self._text(seq), self._gen(seq)]
            case 4:
                op = self._id()
                self._sources.append((op, seq))
                choices = ("yes", "no", "perhaps so")
                return [o.Select(op=op, seq=seq, choices=choices, append=rng.random() < 0.7)]
            case 5:
                return [o.Score(op=self._id(), seq=seq, text="a tree", append=rng.random() < 0.5)]
            case 6 if self._sources:
                return [o.Ref(op=self._id(), seq=seq, source=rng.choice(self._sources)[0])]
            case 7:
                mark = self._id()
                self._marks[seq].append(mark)
                return [o.Mark(op=mark, seq=seq), self._text(seq), o.Mark(op=self._id(), seq=seq, begin=mark)]
            case 8 if self._marks[seq]:
                return [o.Rollback(op=self._id(), seq=seq, to=self._marks[seq][0]), self._text(seq)]
            case 9 if len(self._open) < 4:
                return self._fork(seq)
        return [self._text(seq)]

    def _fork(self, seq: int) -> list[AnyOp]:
        rng = self._rng
        children = tuple(range(self._next_seq, self._next_seq + 2))
        self._next_seq += 2
        found: list[AnyOp] = [o.Fork(op=self._id(), seq=seq, children=children)]
        for child in children:
            self._marks[child] = []
            found += [self._text(child), self._gen(child)]
        if rng.random() < 0.7:
            mode = rng.choice(["gather_variable", "concate_and_append"])
            found.append(o.Join(op=self._id(), seq=seq, children=children, mode=mode))  # type: ignore[arg-type]
            found += [o.Close(op=self._id(), seq=child) for child in children]
        else:
            self._open += children
        return found
