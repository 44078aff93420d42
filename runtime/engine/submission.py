"""The checks on a ``Submit`` before any of its ops runs: every fault of every op, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from hashlib import sha256

from ...constrained.spec import GrammarError
from ...protocol.errors import ErrorInfo
from ...protocol.messages import Limits, ProgramSettings, Submit
from ...protocol.ops import AnyOp, Close, Fork, Gen, Image, Join, Mark, Pin, Ref, Rollback, Score, Select
from .program import Program, SequenceState


def find_faults(
    submit: Submit,
    program: Program | None,
    *,
    limits: Limits,
    vocab_size: int,
    adapters: Collection[str],
    check_stop: Callable[[str], object],
    takes_images: bool = False,
) -> list[tuple[int, ErrorInfo]]:
    """(op id, error) of every fault; op id -1 means the submit as a whole.

    ``check_stop`` raises ``GrammarError`` for a pattern that cannot end a text.
    """
    faults: list[tuple[int, ErrorInfo]] = []

    def fault(op: AnyOp | None, kind: str, message: str) -> None:
        where = "submit" if op is None else f"op {op.op} ({type(op).__name__} on sequence {op.seq})"
        faults.append((-1 if op is None else op.op, ErrorInfo(kind, f"{message}, in {where}", where)))

    if len(submit.ops) > limits.max_ops_per_submit:
        fault(None, "LimitExceeded", f"{len(submit.ops):,} ops, but one submit may hold {limits.max_ops_per_submit:,}")
        return faults
    settings = submit.settings
    if program is not None and settings is not None:
        fault(None, "InvalidRequest", f"program {submit.program!r} has its settings already; send them once")
    if settings is not None and settings.adapter and settings.adapter not in adapters:
        there = f"there are {', '.join(adapters)}" if adapters else "this engine has none (--adapter)"
        fault(None, "UnknownModel", f"adapter {settings.adapter!r} is unknown; {there}")
    if settings is not None and settings.deadline_s is not None and not settings.deadline_s > 0:
        fault(None, "InvalidParams", f"deadline_s={settings.deadline_s}: must be > 0 seconds")

    is_traced = (program.settings if program is not None else settings or ProgramSettings()).trace
    known_ops = dict.fromkeys(program.ops) if program else {}
    marks = {i for i, state in program.ops.items() if isinstance(state.op, Mark)} if program else set()
    sequences = dict.fromkeys(program.sequences) if program else {}
    pictures = set(program.pictures) if program else set()
    if program:
        pictures |= {state.op.hash for state in program.ops.values() if isinstance(state.op, Image)}
    closed = {i for i, state in program.sequences.items() if _closes(state)} if program else set()
    for op in submit.ops:
        if op.op in known_ops:
            fault(op, "InvalidRequest", f"op id {op.op} is taken; ids are unique in their program")
        if op.seq in closed:
            fault(op, "InvalidRequest", f"sequence {op.seq} was closed")
        for kind, message in _own_faults(op, limits, vocab_size, check_stop):
            fault(op, kind, message)
        if isinstance(op, Gen) and op.drawn:
            for kind, message in _drawn_faults(op, vocab_size, is_traced=is_traced):
                fault(op, kind, message)
        match op:
            case Image():
                for kind, message in _image_faults(op, limits, is_known=op.hash in pictures, takes_images=takes_images):
                    fault(op, kind, message)
                pictures.add(op.hash)
            case Fork():
                for child in op.children:
                    if child in sequences:
                        fault(op, "InvalidRequest", f"child {child} exists already; sequence ids are unique")
                    sequences[child] = None
            case Join():
                for child in op.children:
                    if child not in sequences or child == op.seq:
                        fault(op, "InvalidRequest", f"child {child} is not another sequence of this program")
            case Ref() if op.source not in known_ops:
                fault(op, "InvalidRequest", f"source {op.source} is not an earlier op of this program")
            case Mark() if op.begin is not None and op.begin not in marks:
                fault(op, "InvalidRequest", f"begin {op.begin} is not an earlier mark of this program")
            case Rollback() if op.to not in marks:
                fault(op, "InvalidRequest", f"to {op.to} is not an earlier mark of this program")
        if isinstance(op, Mark):
            marks.add(op.op)
        if isinstance(op, Close):
            closed.add(op.seq)
        known_ops[op.op] = None
        sequences[op.seq] = None
    failing = {op.op for op in submit.ops if not isinstance(op, Close)}
    if strange := sorted(submit.failed.keys() - failing):
        fault(None, "InvalidRequest", f"failed names op {strange[0]}, which is not an op of it that can fail")
    if len(sequences) > limits.max_sequences_per_program:
        most = limits.max_sequences_per_program
        fault(None, "LimitExceeded", f"{len(sequences):,} sequences, but one program may have {most:,}")
    return faults


def _own_faults(
    op: AnyOp, limits: Limits, vocab_size: int, check_stop: Callable[[str], object]
) -> Iterator[tuple[str, str]]:
    """(kind, message) of the faults that an op has whatever ops come before it."""
    match op:
        case Gen():
            for text in op.params.faults(vocab_size=vocab_size):
                yield "InvalidParams", text
            for pattern in filter(None, op.params.stop_regex):
                try:
                    check_stop(pattern)
                except GrammarError as error:
                    yield "InvalidParams", f"stop_regex={pattern!r}: {error}"
            if not 1 <= op.n <= limits.max_candidates:
                yield "LimitExceeded", f"n={op.n}: must be between 1 and {limits.max_candidates}"
            if op.grammar is not None and len(op.grammar.text) > limits.max_grammar_bytes:
                size, most = len(op.grammar.text), limits.max_grammar_bytes
                yield "LimitExceeded", f"a grammar of {size:,} characters, but the limit is {most:,}"
        case Select():
            if not op.choices or not all(op.choices):
                yield "InvalidParams", f"choices={list(op.choices)!r}: must be non-empty strings, one or more"
            elif len(op.choices) > limits.max_candidates * 8:
                yield "LimitExceeded", f"{len(op.choices)} choices, but at most {limits.max_candidates * 8}"
        case Score() if not op.text:
            yield "InvalidParams", "text is empty; there is nothing to score"
        case Pin() if not op.ttl_s >= 0:  # NaN too
            yield "InvalidParams", f"ttl_s={op.ttl_s}: must be >= 0 seconds"


def _image_faults(op: Image, limits: Limits, *, is_known: bool, takes_images: bool) -> Iterator[tuple[str, str]]:
    """(kind, message). ``is_known``: an earlier op of the program has sent the image's data."""
    if not takes_images:
        yield "Unsupported", "this model takes no images"
    elif len(op.data) > limits.max_image_bytes:
        size, most = len(op.data), limits.max_image_bytes
        yield "LimitExceeded", f"an image of {size:,} bytes, but the limit is {most:,}; send a smaller file"
    elif op.data and sha256(op.data).hexdigest() != op.hash:
        yield "InvalidRequest", f"hash {op.hash[:64]!r} is not the SHA-256 of the image's data, in hexadecimal digits"
    elif not op.data and not is_known:
        yield "InvalidRequest", "an image without data, and no earlier op of the program has sent it; send its data"


def _drawn_faults(op: Gen, vocab_size: int, *, is_traced: bool) -> Iterator[tuple[str, str]]:
    """(kind, message) of the faults of ``op.drawn``."""
    if len(op.drawn) != op.n:
        yield "InvalidParams", f"drawn has {len(op.drawn)} candidates, but n={op.n}"
    if strange := [i for drawn in op.drawn for i in drawn.token_ids if not 0 <= i < vocab_size]:
        yield "InvalidParams", f"drawn holds token id {strange[0]}, but the vocabulary has {vocab_size:,}"
    num_texts = sum(drawn.text is not None for drawn in op.drawn)
    if num_texts == len(op.drawn):
        return
    params = op.params
    if num_texts:
        yield "InvalidParams", f"drawn has a text for {num_texts} of {len(op.drawn)} candidates; give all or none"
    longest = max(len(drawn.token_ids) for drawn in op.drawn)
    if longest > params.max_tokens and not params.heal:  # tokens that repeat the prompt's end are not counted
        yield "InvalidParams", f"drawn has {longest} tokens of a candidate, but max_tokens={params.max_tokens}"
    if is_traced or (params.return_logprob and params.logprob_start_len >= 0):
        wanted = "the trace" if is_traced else "the prompt's log-probabilities"
        yield "Unsupported", f"drawn without texts, but the op has to return {wanted}; compute it from the beginning"


def _closes(state: SequenceState) -> bool:
    return state.closed or any(isinstance(op_state.op, Close) for op_state in state.queue)
