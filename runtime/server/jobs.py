"""Requests as programs: the ops that each endpoint's request becomes, and the results of such a program.

One request is one program: a sequence per prompt, each with its ``Text`` and ``Special``, one ``Gen``, one ``Close``.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...protocol import errors
from ...protocol.messages import Delta, Done, GenMeta, Limits, ProgramSettings
from ...protocol.ops import AnyOp, Close, Gen, Image, Special, Text
from ...protocol.program_call import OpFailed, SubmitRefused
from ..tokenizer import Tokenizer
from .bridge import Bridge, BridgedCall
from .image_parts import ImagePart

Part = str | tuple[int, ...]  # text, or token ids as they are


@dataclass(frozen=True, slots=True)
class Job:
    """A whole program as one submit: ``gens[i]`` is the id of the Gen of prompt i."""

    ops: tuple[AnyOp, ...]
    gens: tuple[int, ...]
    settings: ProgramSettings


def make_job(
    prompts: Sequence[Iterable[Part | ImagePart]], gens: Sequence[Gen], *, settings: ProgramSettings, limits: Limits
) -> Job:
    """``gens[i]`` says what to generate after ``prompts[i]``; its ids are replaced.

    Raises LimitExceeded where one submit cannot hold all operations.
    """
    ops: list[AnyOp] = []
    gen_ids = []
    for seq, (parts, gen) in enumerate(zip(prompts, gens, strict=True)):
        if gen.n > limits.max_candidates:
            raise errors.LimitExceeded(f"n={gen.n}: must be at most {limits.max_candidates}", where="n")
        for part in parts:
            if isinstance(part, str):
                ops.append(Text(op=len(ops), seq=seq, text=part))
            elif isinstance(part, ImagePart):
                ops.append(Image(op=len(ops), seq=seq, hash=part.hash, data=part.data))
            else:
                ops.append(Special(op=len(ops), seq=seq, ids=part))
        gen_ids.append(len(ops))
        ops.append(Gen(op=len(ops), seq=seq, params=gen.params, grammar=gen.grammar, n=gen.n, stream=gen.stream))
        ops.append(Close(op=len(ops), seq=seq))
    if len(ops) > limits.max_ops_per_submit:
        raise errors.LimitExceeded(
            f"the request makes {len(ops):,} operations (about 4 for a message, 3 for a prompt), but one may make "
            f"{limits.max_ops_per_submit:,}; send fewer messages or prompts, or join neighbouring ones"
        )
    return Job(tuple(ops), tuple(gen_ids), settings)


def check_number(prompts: Sequence[object], limits: Limits, *, name: str) -> None:
    """Raise LimitExceeded for more prompts than one submit can hold, before any is read."""
    most = limits.max_ops_per_submit // 3
    if len(prompts) > most:
        raise errors.LimitExceeded(f"{name} holds {len(prompts):,} prompts, but at most {most:,} fit", where=name)


def raw_parts(
    prompt: str | list[int], tokenizer: Tokenizer, *, parse_special: bool, name: str, context_len: int
) -> list[Part]:
    """A prompt that no template touches. ``parse_special``: special tokens written in the text count as such.

    Raises PromptTooLong for a prompt that cannot fit the context, before it is tokenized.
    """
    if isinstance(prompt, str):
        tokenizer.check_length(len(prompt), context_len)
        return [tuple(tokenizer.encode(prompt, special=True, at_start=True))] if parse_special else [prompt]
    check_ids(prompt, tokenizer, name=name, context_len=context_len)
    return [tuple(prompt)]


def check_ids(ids: Sequence[int], tokenizer: Tokenizer, *, name: str, context_len: int) -> None:
    """Raise an InvalidRequest for more token ids than the context holds, and for one that the vocabulary lacks."""
    if len(ids) > context_len:
        message = f"{name} holds {len(ids):,} token ids, but the context is {context_len:,}; shorten the prompt"
        raise errors.PromptTooLong(f"{message} or start with a larger --max-seq-len", where=name)
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            message = f"{name} holds token id {token}, but the vocabulary has {tokenizer.vocab_size:,}"
            raise errors.InvalidRequest(message, where=name)


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of candidate ``delta.index`` of prompt ``prompt``."""

    prompt: int
    delta: Delta


@dataclass(frozen=True, slots=True)
class Result:
    """All candidates of prompt ``prompt``, finished."""

    prompt: int
    texts: tuple[str, ...]
    meta: GenMeta


class RunningJob:
    """Ends when every Gen has its result, or with the first failure; ``close`` before that cancels the program."""

    @classmethod
    async def begin(cls, bridge: Bridge, job: Job) -> "RunningJob":
        """Send ``job``. Raises what the client raises; what the engine refuses is raised by ``events``."""
        opened_s = time.perf_counter()
        return cls(bridge, job, await bridge.send(job.ops, job.settings), opened_s=opened_s)

    def __init__(self, bridge: Bridge, job: Job, bridged: BridgedCall, *, opened_s: float) -> None:
        self.opened_s = opened_s
        self.first_text_s: float | None = None
        self._bridge = bridge
        self._prompt_of = {op: i for i, op in enumerate(job.gens)}
        self._unfinished = set(job.gens)
        self._failure: errors.PhloemError | None = None
        self.bridged = bridged

    async def events(self) -> Sequence[Piece | Result]:
        """What has come since the last call, at least one; empty at the end. Raises the failure."""
        while self._unfinished and self._failure is None:
            found: list[Piece | Result] = []
            for event in await self.bridged.events():
                if type(event) is Delta:
                    if self.first_text_s is None:
                        self.first_text_s = time.perf_counter()
                    found.append(Piece(self._prompt_of[event.op], event))
                elif type(event) is Done:
                    if event.op in self._unfinished:
                        assert isinstance(event.meta, GenMeta)
                        self._unfinished.discard(event.op)
                        found.append(Result(self._prompt_of[event.op], tuple(event.value), event.meta))
                elif isinstance(event, OpFailed | SubmitRefused) and self._unfinished:
                    self._failure = event.error
                    break
            if found:
                return found
        if self._failure is not None:
            raise self._failure
        return ()

    async def results(self) -> list[Result]:
        """The result of every prompt, in order."""
        found: dict[int, Result] = {}
        while events := await self.events():
            found.update((event.prompt, event) for event in events if isinstance(event, Result))
        return [found[i] for i in sorted(found)]

    def close(self) -> None:
        """Cancel the prompts that are not finished."""
        if self._unfinished:
            self.bridged.call.cancel()
        self._bridge.release(self.bridged)
