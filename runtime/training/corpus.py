"""The training corpus: texts of the model, and for each token its feature, the head's input for the next token.

The engine generates the answers, sixteen at a time; each text is then run once through the model to get its features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...protocol import messages as m
from ...protocol import ops as o
from ...protocol.sampling import SamplingParams
from ..executor import Executor
from ..memory import KVPool
from ..scheduler import PlanRow, StepPlan

if TYPE_CHECKING:
    from ..engine import EngineCore

_AT_ONCE = 16
_CHUNK = 256
_CLIENT = b"training"


@dataclass(frozen=True, slots=True)
class CorpusText:
    """Tokens int64 [n] and their features [n, C]; the tokens before ``first`` are the question."""

    token_ids: torch.Tensor
    features: torch.Tensor
    first: int


@dataclass(frozen=True, slots=True)
class Corpus:
    texts: tuple[CorpusText, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) - text.first for text in self.texts)


def collect(
    engine: EngineCore,
    questions: Sequence[str],
    documents: Sequence[str] = (),
    *,
    max_tokens: int = 40_000,
    answer_tokens: int = 160,
    progress: Callable[[str, int, int], None] | None = None,
) -> Corpus:
    """``documents`` in parts of 512 tokens, and answers to ``questions`` until there are ``max_tokens`` tokens.

    Answers are sampled at temperature 0.7 with fixed seeds.
    """
    say = progress or (lambda what, done, total: None)
    texts: list[tuple[np.ndarray, int]] = []
    for document in documents:
        ids = np.array(engine.tokenizer.encode(document), np.int32)
        texts += [(ids[i : i + 512], 0) for i in range(0, len(ids), 512) if len(ids) - i > 8]
    num_tokens = sum(len(ids) for ids, _ in texts)
    for start in range(0, len(questions), _AT_ONCE):
        if num_tokens >= max_tokens:
            break
        found = _answers(engine, questions[start : start + _AT_ONCE], max_tokens=answer_tokens, seed=start)
        texts += found
        num_tokens += sum(len(ids) - first for ids, first in found)
        say("tokens of text", min(num_tokens, max_tokens), max_tokens)
    kv = KVPool.for_model(engine.model.config, num_slots=1024, dtype=engine.model.kv_dtype, device=engine.model.device)
    executor = Executor(engine.model, kv, max_rows=1, max_len=1024)
    return Corpus(
        tuple(CorpusText(*_features(executor, ids[:1024]), first) for ids, first in texts if len(ids) - first > 8)
    )


def _answers(
    engine: EngineCore, questions: Sequence[str], *, max_tokens: int, seed: int
) -> list[tuple[np.ndarray, int]]:
    """For each question its tokens with those of the answer, and where the answer begins."""
    inbox: list[tuple[bytes, m.ClientMessage]] = []
    prompts: list[list[int]] = []
    for i, question in enumerate(questions):
        ids = _rendered(engine, question)
        prompts.append(ids)
        params = SamplingParams(temperature=0.7, seed=seed + i, max_tokens=max_tokens, speculative=False)
        ops: list[o.AnyOp] = [
            o.Special(op=0, seq=0, ids=tuple(ids)),
            o.Gen(op=1, seq=0, params=params),
            o.Close(op=2, seq=0),
        ]
        inbox.append((_CLIENT, m.Submit(f"text {seed + i}", ops)))
    found: dict[str, tuple[int, ...]] = {}
    num_open = len(questions)
    give_up_s = time.monotonic() + 600.0
    while num_open and time.monotonic() < give_up_s:
        for _, message in engine.step(inbox):
            if isinstance(message, m.Done) and isinstance(message.meta, m.GenMeta):
                found[message.program] = message.meta.candidates[0].token_ids
            elif isinstance(message, m.Failed | m.Rejected):
                raise RuntimeError(message)
            elif isinstance(message, m.Closed):
                num_open -= 1
        inbox = []
    return [
        (np.array([*prompt, *found[f"text {seed + i}"]], np.int32), len(prompt)) for i, prompt in enumerate(prompts)
    ]


def _rendered(engine: EngineCore, question: str) -> list[int]:
    tokenizer = engine.tokenizer
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    if engine.template is None:
        return [*bos, *tokenizer.encode(question + "\n\n")]
    parts = engine.template.render([{"role": "user", "content": question}])
    ids = [id_ for part in parts for id_ in (tokenizer.encode(part) if isinstance(part, str) else part)]
    return ids if ids[: len(bos)] == bos else [*bos, *ids]


@torch.inference_mode()
def _features(executor: Executor, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    slots = np.arange(len(ids), dtype=np.int32)
    for start in range(0, len(ids), _CHUNK):
        piece = ids[start : start + _CHUNK]
        end = start + len(piece)
        row = PlanRow(0, 0, start, piece, slots[:end], 0 if start == 0 else start, len(piece))
        found.append(executor.features_of(StepPlan(0, (row,))))
    return torch.from_numpy(ids.astype(np.int64)), torch.cat(found).cpu()
