"""The executor: turns a step plan into tensors, runs the forward, and draws tokens from the logits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import torch

from ... import kernels
from ...protocol.sampling import SamplingParams
from ...radix_cache import FIRST_CONTENT_ID, in_vocabulary
from ..layers.batch import ForwardBatch, GivenInputs, StepArrays
from ..scheduler import StepPlan
from .accelerator import Accelerator, Readback, accelerator_of
from .device_batch import DeviceBatch
from .greedy_head import MOST_ROWS, GreedyHead
from .prefixes import PrefixFinder
from .split_steps import SplitSteps, shortlist_len
from .step_graphs import StepGraphs
from .step_logits import StepLogits, StepMasks
from .step_tapes import StepTapes

if TYPE_CHECKING:
    from ...constrained import Matcher
    from ..memory import KVPool
    from ..models import Model
    from ..models.decoder import HeldSlots, Stage


NO_LOGPROBS = torch.full((MOST_ROWS,), torch.nan)


class ContentRows(Protocol):
    """The decoder's inputs for tokens that stand for contents. Sampling and scores count such a token as
    ``placeholder``, a token of the vocabulary.
    """

    placeholder: int

    def rows(self, token_ids: np.ndarray) -> torch.Tensor:
        """[G, C] of ids from ``FIRST_CONTENT_ID`` on."""
        ...


class SampleRow(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One token to draw. ``token_ids`` are prompt and output so far; the random number depends on (seed, their number).

    A grammar's mask comes from ``matcher``, or is ``mask`` (uint32 words) if the caller has it already.
    """

    logits_row: int
    params: SamplingParams
    seed: int
    token_ids: np.ndarray
    prompt_len: int
    matcher: Matcher | None = None
    banned: frozenset[int] = frozenset()
    mask: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class DrawArrays:
    """Draws as arrays [R], each equal to a ``SampleRow`` without penalties, bias and log-probabilities.

    ``num_tokens``: the length of prompt and output so far. ``masks[mask_ids[i]]`` (uint32 words) says which tokens
    draw ``masked[i]`` can be; other draws can be any token.
    """

    logits_rows: np.ndarray  # int64
    seeds: np.ndarray  # int64
    num_tokens: np.ndarray  # int64
    temperature: np.ndarray  # float32
    top_k: np.ndarray  # int32
    top_p: np.ndarray  # float32
    min_p: np.ndarray  # float32
    wants_logprob: np.ndarray  # bool
    masked: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    mask_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    masks: list[np.ndarray] = field(default_factory=list)
    takes_highest: bool = False  # known: no temperature, no log-probability, and ``logits_rows`` count from 0

    def at(self, num_tokens: np.ndarray, mask_ids: np.ndarray, masks: list[np.ndarray]) -> DrawArrays:
        """The draws of the same rows in a later step."""
        return DrawArrays(
            self.logits_rows,
            self.seeds,
            num_tokens,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.wants_logprob,
            self.masked,
            mask_ids,
            masks,
            self.takes_highest,
        )

    def __len__(self) -> int:
        return len(self.logits_rows)


def arrays_of(rows: list[SampleRow]) -> DrawArrays:
    """The sampling parameters of ``rows`` as arrays, without masks and penalties."""
    params = [row.params for row in rows]
    return DrawArrays(
        logits_rows=np.array([row.logits_row for row in rows], np.int64),
        seeds=np.array([row.seed for row in rows], np.int64),
        num_tokens=np.array([len(row.token_ids) for row in rows], np.int64),
        temperature=np.array([row.temperature for row in params], np.float32),
        top_k=np.array([row.top_k for row in params], np.int32),
        top_p=np.array([row.top_p for row in params], np.float32),
        min_p=np.array([row.min_p for row in params], np.float32),
        wants_logprob=np.array([row.return_logprob for row in params], np.bool_),
    )


def _joined(parts: list[DrawArrays]) -> DrawArrays:
    """The draws of ``parts`` in order, without masks."""
    if len(parts) == 1:
        return parts[0]
    names = ("logits_rows", "seeds", "num_tokens", "temperature", "top_k", "top_p", "min_p", "wants_logprob")
    return DrawArrays(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """``logprob`` is taken after mask, bias and penalties and before temperature; undefined where nobody wants it."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


@dataclass(frozen=True, slots=True)
class StepDraws:
    """One step's draws, on the device. ``tops``: by draw, the likeliest tokens and their logprobs, where requested."""

    token_ids: torch.Tensor  # int64 [R]
    logprobs: torch.Tensor  # float32 [R]
    tops: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def ids(self, values: list[torch.Tensor]) -> np.ndarray:
        """The drawn token ids. ``values``: host copies of ``tensors()``."""
        return values[0].numpy()

    def tensors(self) -> list[torch.Tensor]:
        return [self.token_ids, self.logprobs, *(x for top in self.tops.values() for x in top)]

    def tokens(self, values: list[torch.Tensor], *, first: int = 0) -> list[SampledToken]:
        """The draws from ``first`` on."""
        found = [SampledToken(*x) for x in zip(values[0][first:].tolist(), values[1][first:].tolist(), strict=True)]
        for i, ids, logprobs in zip(self.tops, values[2::2], values[3::2], strict=True):
            top = list(zip(ids[0].tolist(), logprobs[0].tolist(), strict=True))
            found[i - first] = SampledToken(found[i - first].token_id, found[i - first].logprob, top)
        return found


class Executor:
    """Owns the slot table: row r holds the slots of the sequence with row id r.

    On a CPU every call is complete when it returns. With an ``accelerator`` a call only queues work on the device;
    the result of ``read`` waits for it.
    """

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        *,
        max_rows: int,
        max_len: int,
        num_tokens: int = 0,
        accelerator: Accelerator | None = None,
        use_graphs: bool = True,
        split: SplitSteps | None = None,
        contents: ContentRows | None = None,
    ) -> None:
        """``num_tokens``: tokens of the vocabulary; logits beyond it are padding and never drawn. 0: all are tokens.

        With an accelerator the executor owns the pool's last slot; no sequence may use it. ``split``: the other ranks,
        where this is rank 0 of several. ``contents``: None where plans hold no ids of contents.
        """
        self._contents = contents
        self._split = split
        self.model = model
        self.kv = kv
        self.device = torch.device(model.device)
        self.accelerator = accelerator if accelerator is not None else accelerator_of(self.device)
        self.features = torch.empty(0)  # [L, C], the head's input of the last step; valid until the next step
        self._num_tokens = num_tokens or model.config.vocab_size
        self._mask_words = (model.config.vocab_size + 31) // 32
        self._row_adapters = np.full(max_rows, -1, dtype=np.int64)  # of vectorised rows, which the plan does not say
        self._tapes: StepTapes | None = None
        self._greedy: GreedyHead | None = None
        self.graphs: StepGraphs | None = None
        self.inputs: DeviceBatch | None = None
        self._owned: HeldSlots | None = None  # where other ranks have some of the slots: in place of the slot table
        if model.sequence is not None:
            self._owned = model.sequence.slots(pool_slots=kv.num_slots, max_rows=max_rows, max_len=max_len)
        if self.accelerator is None:
            self.slot_table = np.zeros((max_rows, max_len), dtype=np.int32)
            if model.has_tapes:
                self._tapes = StepTapes(model, kv)
                self._greedy = None if split else GreedyHead(model, num_tokens=self._num_tokens)
            return
        with torch.inference_mode():
            spare_slot = kv.num_slots - 1
            self.inputs = DeviceBatch(
                self.accelerator,
                max_rows=max_rows,
                max_len=max_len,
                spare_slot=spare_slot,
                prefixes=prefix_finder(model, kv, num_rows=max_rows, max_len=max_len),
            )
            if use_graphs and model.stage is None and model.sequence is None:
                self.graphs = StepGraphs(model, kv, self.inputs)

    @property
    def is_cold(self) -> bool:
        """Whether the last step took longer than later steps of its shape will."""
        kept = self.graphs or self._tapes
        return kept is not None and kept.is_cold

    def prepare_draws(self) -> None:
        """Make what greedy draws of several rows need, before the first of them: some 20 ms. Not beside a step."""
        if self._greedy is not None:
            self._greedy.prepare()

    @torch.inference_mode()
    def record_ahead(self) -> bool:
        """Record the tape, or capture the graph, of one more size of a step before a step has it: some 3 ms, on a GPU
        some 80. False where none is missing.
        """
        if self.graphs is not None:
            return self._split is None and self.graphs.capture_ahead()
        if self._tapes is None or self._owned is not None:
            return False
        return self._tapes.record_ahead(torch.from_numpy(self.slot_table))

    @property
    def num_fed(self) -> int:
        """The next plan may use draws below this number before the host has read them."""
        return self.inputs.num_fed if self.inputs is not None else 0

    def forward(self, plan: StepPlan, *, needs_all: bool = True) -> StepLogits:
        """Logits [L, V] of each row's last ``num_logits`` positions, in the plan's order. Valid until the next step.

        Without ``needs_all`` the caller reads only the head's input of some positions.
        """
        step = StepArrays.of(plan)
        if self._tapes is not None and self._split is None and step.is_decode:
            features = self._replayed(plan, step)
            if features is not None:
                self.features = features
                return self._logits(features)
        return self._forward(plan, step, needs_all=needs_all)

    def _replayed(self, plan: StepPlan, step: StepArrays) -> torch.Tensor | None:
        """The features of a step of one token a row, from a tape that is there already; else None."""
        assert self._tapes is not None
        if self._owned is not None or self.model.stage is not None or len(self.model.adapters):
            return None
        if self._given(plan) is not None:
            return None
        step.put_slots(self.slot_table)
        return self._tapes.forward_decode(step)

    @torch.inference_mode()
    def _forward(self, plan: StepPlan, step: StepArrays, *, needs_all: bool) -> StepLogits:
        given = self._given(plan)
        step = replace(step, adapters=self._adapters_of(plan))
        if self._split is not None:
            self._split.announce(step, None if self.inputs is None else self.inputs.drawn)
        self.run(step, given)
        if not needs_all and self._split is not None:
            self.features = self._split.inputs(self.features)
        logits = self._logits(self.features)
        if needs_all and self.inputs is not None and self._split is None:
            logits.whole()  # queue the head now: the device runs it while the host works
        return logits

    @torch.inference_mode()
    def run(self, step: StepArrays, given: GivenInputs | None = None) -> torch.Tensor:
        """The head's input [L, C] of the step, as far as this stage has it. Valid until the next step."""
        if self.model.stage is not None:
            self.features = self._run_stage(step, self.model.stage)
            return self.features
        features = None
        if self.graphs is not None and given is None:
            features = self.graphs.forward(step)
        if features is None:
            batch = _with_given(self._batch_of(step), given)
            if self._tapes is not None:
                features = self._tapes.forward(batch)
            if features is None:
                features = self.model.features(batch, self.kv)
        self.features = features
        return features

    def _batch_of(self, step: StepArrays) -> ForwardBatch:
        batch, adapters = self._plain_batch(step), step.adapters
        if adapters is not None and batch.spread is not None:
            adapters = adapters[batch.spread.own.start : batch.spread.own.stop]
        return self._adapted(batch, adapters)

    def _plain_batch(self, step: StepArrays) -> ForwardBatch:
        if self._owned is None:
            if self.inputs is not None:
                return self.inputs.forward_batch(step)
            return ForwardBatch.from_arrays(step, self.slot_table, self.device)
        batch = self._owned.batch(step)
        if self.inputs is None:
            return batch
        batch = batch.uploaded(self.inputs.accelerator.upload)
        return replace(batch, token_ids=self.inputs.known(batch.token_ids))

    def _run_stage(self, step: StepArrays, stage: Stage) -> torch.Tensor:
        """The head's input from all of the step's micro-steps."""
        parts = step.cut(stage.num_micro_steps(step.num_tokens))
        batches = [self._batch_of(part) for part in parts]
        stage.begin([batch.num_tokens for batch in batches])
        made = [self.model.features(batch, self.kv) for batch in batches]
        return made[0] if len(made) == 1 else torch.cat(made)

    def _given(self, plan: StepPlan) -> GivenInputs | None:
        """The inputs of the plan's tokens that stand for contents; None where there are none."""
        if self._contents is None or not any(row.token_ids.max() >= FIRST_CONTENT_ID for row in plan.rows):
            return None
        token_ids = np.concatenate([row.token_ids for row in plan.rows])
        at = np.flatnonzero(token_ids >= FIRST_CONTENT_ID)
        rows = self._contents.rows(token_ids[at])
        return GivenInputs(self._on_device(at + plan.num_vectorised), rows.to(self.device))

    def _text_ids(self, token_ids: np.ndarray) -> np.ndarray:
        """``token_ids`` as sampling and scores count them."""
        return token_ids if self._contents is None else in_vocabulary(token_ids, self._contents.placeholder)

    def _adapters_of(self, plan: StepPlan) -> np.ndarray | None:
        """Each token's adapter, -1 for none; None if no token has one."""
        if not len(self.model.adapters):
            return None
        rows = plan.rows
        own = np.array([row.adapter for row in rows], dtype=np.int64)
        self._row_adapters[[row.row_id for row in rows]] = own
        ids = np.repeat(own, [len(row.token_ids) for row in rows])
        if plan.vectorised is not None:
            ids = np.concatenate((self._row_adapters[plan.vectorised.row_ids], ids))
        return ids if (ids >= 0).any() else None

    def _adapted(self, batch: ForwardBatch, adapters: np.ndarray | None) -> ForwardBatch:
        if adapters is None:
            return batch
        return batch.with_adapters(self._on_device(adapters), len(self.model.adapters))

    def _logits(self, features: torch.Tensor) -> StepLogits:
        vocab_size = self.model.config.vocab_size
        return StepLogits(features, self.head, vocab_size=vocab_size, can_pick=self.model.head.can_pick)

    @torch.inference_mode()
    def head(self, features: torch.Tensor, blocks: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        head = self.model.head
        if blocks is not None:
            return head.pick(features, blocks, out)
        if out is None:
            return self.model.logits_of(features)
        return head.write(features, out)

    def draw(self, step: StepLogits, rows: list[SampleRow], vectorised: DrawArrays | None = None) -> StepDraws:
        """Draw one token for each of ``vectorised``, then one for each row. May change the step's logits in place.

        The next plan may use these draws by number.
        """
        masks = self.masks_of(rows, vectorised)
        if vectorised is not None and not rows and self._greedy is not None:
            greedy = self._draw_greedy(self._greedy, step, vectorised, masks)
            if greedy is not None:
                return greedy
        return self._draw(step, rows, vectorised, masks)

    @torch.inference_mode()
    def _draw(
        self, step: StepLogits, rows: list[SampleRow], vectorised: DrawArrays | None, masks: StepMasks | None
    ) -> StepDraws:
        num_vectorised = 0 if vectorised is None else len(vectorised)
        arrays = arrays_of(rows) if rows or vectorised is None else None
        drawn = _joined([part for part in (vectorised, arrays) if part is not None])
        edits = kernels.LogitEdits.from_params(
            [row.params for row in rows],
            [self._text_ids(row.token_ids) for row in rows],
            [row.prompt_len for row in rows],
        )
        wants_top = any(row.params.return_logprob and row.params.top_logprobs_num for row in rows)
        if self._split is not None and edits is None and not wants_top:
            listed = self._draw_listed(self._split, step, drawn, masks)
            if listed is not None:
                return listed
        if self._greedy is not None and rows and edits is None and not wants_top:
            greedy = self._draw_greedy(self._greedy, step, drawn, masks)
            if greedy is not None:
                return greedy
        order: np.ndarray | None = None
        if len(drawn) != len(step) or (drawn.logits_rows != np.arange(len(step))).any():
            if self._split is not None:
                step.whole()  # the ranks compute the logits of all rows or none
            logits = step.of(self._on_device(drawn.logits_rows))
        elif masks is None:
            logits = step.whole()
        else:
            logits, order = step.allowed(masks, may_move=edits is None and not wants_top)
        draw = kernels.uniform(drawn.seeds, drawn.num_tokens)
        batch = kernels.SampleBatch(drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p, draw, drawn.wants_logprob)
        if order is not None and masks is not None:
            batch, masks = batch.take(order), masks.take(order)
        self.constrain(logits, masks if wants_top else None)
        if edits is not None:
            kernels.apply_edits(logits[num_vectorised:], edits)
        if masks is None or wants_top:
            sampled = kernels.sample(logits, batch)
        else:  # the kernel reads only the logits that the masks allow
            words = self._on_device(masks.words.view(np.int32))
            sampled = kernels.sample(logits, batch, mask=words, rows=self._rows(masks, len(logits)), ids=masks.ids)
        if order is not None:
            place = self._on_device(np.argsort(order))
            sampled = kernels.Sampled(sampled.token_ids[place], sampled.logprobs[place])
        if self.inputs is not None:
            self.inputs.take_draws(sampled.token_ids)
        tops = {
            i: kernels.top_logprobs(logits[i : i + 1], row.params.top_logprobs_num)
            for i, row in enumerate(rows, start=num_vectorised)
            if row.params.return_logprob and row.params.top_logprobs_num
        }
        return StepDraws(sampled.token_ids, sampled.logprobs, tops)

    @staticmethod
    def _draw_greedy(
        head: GreedyHead, step: StepLogits, drawn: DrawArrays, masks: StepMasks | None
    ) -> StepDraws | None:
        """The draws where all are greedy and nobody wants a log-probability; None where they need logits."""
        if step.is_computed or len(drawn) != len(step):
            return None
        if not drawn.takes_highest and (
            drawn.temperature.any() or drawn.wants_logprob.any() or (drawn.logits_rows != np.arange(len(step))).any()
        ):
            return None
        token_ids = head.draw(step.features, masks)
        return None if token_ids is None else StepDraws(token_ids, NO_LOGPROBS[: len(token_ids)], {})

    def _draw_listed(
        self, split: SplitSteps, step: StepLogits, drawn: DrawArrays, masks: StepMasks | None
    ) -> StepDraws | None:
        """The draws, from a few tokens of each rank; None where they need all logits."""
        k = shortlist_len(drawn.temperature, drawn.top_k)
        if k is None or step.is_computed or not np.array_equal(drawn.logits_rows, np.arange(len(step))):
            return None
        found = split.shortlist(step.features, k, masks)
        draw = kernels.uniform(drawn.seeds, drawn.num_tokens)
        batch = kernels.SampleBatch(drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p, draw)
        places = kernels.sample(found.logits.clone(), batch).token_ids  # -1: no token is allowed
        place = places.clamp_min(0).unsqueeze(1)
        token_ids = torch.where(places < 0, -1, found.token_ids.gather(1, place).squeeze(1))
        logprobs = found.logits.gather(1, place).squeeze(1) - found.logsumexp
        if self.inputs is not None:
            self.inputs.take_draws(token_ids)
        return StepDraws(token_ids, logprobs, {})

    def sample(self, step: StepLogits, rows: list[SampleRow]) -> list[SampledToken]:
        """As ``draw``, but wait for the tokens."""
        if not rows:
            return []
        drawn = self.draw(step, rows)
        return drawn.tokens(self.read(drawn.tensors()).wait())

    def read(self, tensors: list[torch.Tensor]) -> Readback:
        """Start copying ``tensors`` to the host."""
        return AtHand(tensors) if self.accelerator is None else self.accelerator.download(tensors)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array) if self.accelerator is None else self.accelerator.upload(array)

    def masks_of(self, rows: list[SampleRow], vectorised: DrawArrays | None) -> StepMasks | None:
        """The masks of the draws that a grammar or banned tokens restrict; None if no draw is restricted."""
        num_vectorised, num_masks = (0, 0) if vectorised is None else (len(vectorised), len(vectorised.masks))
        masked = [i for i, row in enumerate(rows) if row.matcher is not None or row.mask is not None or row.banned]
        if not masked and not num_masks:
            return None
        words = np.full((num_masks + len(masked), self._mask_words), 0xFFFFFFFF, dtype=np.uint32)
        indices = np.array(masked, np.int64) + num_vectorised
        ids = np.arange(num_masks, len(words))
        if vectorised is not None and num_masks:
            np.stack(vectorised.masks, out=words[:num_masks])
            indices = np.concatenate((vectorised.masked, indices))
            ids = np.concatenate((vectorised.mask_ids, ids))
        for line, i in zip(words[num_masks:], masked, strict=True):
            row = rows[i]
            if row.matcher is not None:
                row.matcher.fill_mask(line)
            elif row.mask is not None:
                line[:] = row.mask
            for token_id in row.banned:
                line[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        return StepMasks(indices, ids, words)

    def constrain(self, logits: torch.Tensor, masks: StepMasks | None) -> None:
        """Set the logits of padding and of masked tokens to -inf, in place."""
        if self._num_tokens < logits.shape[1]:
            logits[:, self._num_tokens :] = float("-inf")
        if masks is not None:
            kernels.apply_bitmask(logits, self._words(masks), rows=self._rows(masks, len(logits)))

    def _words(self, masks: StepMasks) -> torch.Tensor:
        words = self._on_device(masks.words.view(np.int32))
        if np.array_equal(masks.ids, np.arange(len(masks.words))):
            return words
        return words[self._on_device(masks.ids)]  # equal masks are uploaded once

    def _rows(self, masks: StepMasks, num_rows: int) -> torch.Tensor | None:
        return None if len(masks.rows) == num_rows else self._on_device(masks.rows)

    @torch.inference_mode()
    def logprobs_of(self, logits: torch.Tensor, token_ids: np.ndarray) -> torch.Tensor:
        """float32 [L]: log softmax(logits)[i, token_ids[i]] of each row i."""
        token_ids = self._text_ids(token_ids)
        return kernels.gather_logprobs(logits, self._on_device(np.ascontiguousarray(token_ids, dtype=np.int64)))

    @torch.inference_mode()
    def top_logprobs(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's ``k`` likeliest tokens and their log-probabilities, likeliest first."""
        return kernels.top_logprobs(logits, k)


def _with_given(batch: ForwardBatch, given: GivenInputs | None) -> ForwardBatch:
    """``batch`` with these inputs; ids of contents become 0, which the embedding has."""
    if given is None:
        return batch
    return replace(batch, token_ids=batch.token_ids.index_fill(0, given.at, 0), given=given)


def prefix_finder(model: Model, kv: KVPool, *, num_rows: int, max_len: int) -> PrefixFinder | None:
    """None where the device's kernels find shared prefixes by themselves, or no layer's kernel reads them once: layers
    with a sliding window and latent attention. None too where ranks have different numbers of heads, as each of them
    must find the same.
    """
    config = model.config
    if not model.is_even or config.latent is not None or all(layer.attention.window for layer in model.layers):
        return None
    group = config.num_heads // config.num_kv_heads
    sharing = kernels.sharing_of(model.device, group=group, head_dim=config.head_dim, dtype=model.dtype)
    if sharing is None:
        return None
    slot_bytes = config.slot_vectors * config.num_kv_heads * config.head_dim * kv.dtype.itemsize
    key_bytes = slot_bytes + 4  # with its slot's number
    return PrefixFinder(sharing, key_bytes=key_bytes, num_rows=num_rows, max_len=max_len)


@dataclass(frozen=True, slots=True)
class AtHand:
    """Results that are already on the host."""

    tensors: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        return self.tensors
