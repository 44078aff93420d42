"""The faults for which the string engine refuses a submit, before any of its ops runs."""

from dataclasses import dataclass, field

from phloem.protocol import errors, messages, ops
from phloem.tests.runtime.string_tokens import SPECIAL_TEXT


@dataclass(slots=True, kw_only=True)
class SubmitCheck:
    """Starts with the ops that the program has accepted, and adds each op: later ops may name earlier ones."""

    limits: messages.Limits
    vocab_size: int
    accepted: dict[int, ops.AnyOp] = field(default_factory=dict)
    lineage: dict[int, frozenset[int]] = field(default_factory=dict)  # sequence -> its ancestors
    closing: set[int] = field(default_factory=set)  # sequences whose Close was accepted
    faults: list[errors.ErrorInfo] = field(default_factory=list)
    bad_ops: set[int] = field(default_factory=set)

    def run(self, submit: messages.Submit, *, is_first: bool) -> None:
        limits = self.limits
        if len(submit.ops) > limits.max_ops_per_submit:
            message = f"{len(submit.ops)} ops in one submit, but the limit is {limits.max_ops_per_submit}; send fewer"
            self._fault(errors.LimitExceeded, message, "ops")
            return
        if not is_first and submit.settings is not None:
            self._fault(errors.InvalidRequest, "settings go with a program's first submit only", "settings")
        for i, op in enumerate(submit.ops):
            self._check_place(op, f"ops[{i}]")
            self._check_op(op, f"ops[{i}]")
            self.accepted[op.op] = op
        if len(self.lineage) > limits.max_sequences_per_program:
            message = f"{len(self.lineage)} sequences, but the limit is {limits.max_sequences_per_program}"
            self._fault(errors.LimitExceeded, message, "ops")

    def _fault(self, kind: type[errors.PhloemError], message: str, where: str, op: ops.AnyOp | None = None) -> None:
        self.faults.append(kind(message, where=where).info())
        if op is not None:
            self.bad_ops.add(op.op)

    def _check_place(self, op: ops.AnyOp, where: str) -> None:
        if op.op in self.accepted:
            self._fault(errors.InvalidRequest, f"op id {op.op} is used twice", f"{where}.op", op)
        if op.seq in self.closing:
            self._fault(errors.InvalidRequest, f"sequence {op.seq} is closed", f"{where}.seq", op)
        self.lineage.setdefault(op.seq, frozenset())

    def _check_op(self, op: ops.AnyOp, where: str) -> None:
        own = self.lineage[op.seq] | {op.seq}
        match op:
            case ops.Special() if unknown := [t for t in op.ids if t not in SPECIAL_TEXT]:
                self._fault(errors.InvalidRequest, f"{unknown[0]} is no special token", f"{where}.ids", op)
            case ops.Ref():
                if not isinstance(self.accepted.get(op.source), ops.Gen | ops.Select | ops.Mark | ops.Ref):
                    self._fault(errors.InvalidRequest, f"op {op.source} produces no text", f"{where}.source", op)
            case ops.Gen():
                for text in op.params.faults(vocab_size=self.vocab_size):
                    self._fault(errors.InvalidParams, text, f"{where}.params", op)
                if not 1 <= op.n <= self.limits.max_candidates:
                    message = f"n={op.n}: must be 1 to {self.limits.max_candidates}"
                    self._fault(errors.LimitExceeded, message, f"{where}.n", op)
            case ops.Select() if not op.choices:
                self._fault(errors.InvalidRequest, "choices is empty", f"{where}.choices", op)
            case ops.Fork():
                for child in op.children:
                    if child in self.lineage:
                        self._fault(errors.InvalidRequest, f"sequence {child} exists already", f"{where}.children", op)
                    self.lineage[child] = own
            case ops.Join():
                for child in op.children:
                    if child not in self.lineage or op.seq not in self.lineage[child]:
                        message = f"sequence {child} is no child of {op.seq}"
                        self._fault(errors.InvalidRequest, message, f"{where}.children", op)
            case ops.Mark(begin=int(point)) | ops.Rollback(to=point):
                mark = self.accepted.get(point)
                if not isinstance(mark, ops.Mark) or mark.begin is not None or mark.seq not in own:
                    message = f"op {point} is no mark of sequence {op.seq}"
                    self._fault(errors.InvalidRequest, message, where, op)
            case ops.Image():
                self._fault(errors.Unsupported, "images are not supported by this model", where, op)
            case ops.Close():
                self.closing.add(op.seq)
