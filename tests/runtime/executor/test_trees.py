"""A draft tree runs in one forward, and each of its tokens has exactly the logits that it has in a chain."""

import numpy as np
import pytest
import torch
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor import Executor
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.scheduler import Draft, PlanRow, StepPlan
from phloem.runtime.scheduler.draft import branches_of
from phloem.tests.runtime.models.tiny import make_tiny_gguf

MAX_LEN = 700


@pytest.fixture(scope="module", params=["Q4_0", "F32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("trees") / "tiny.gguf"
    make_tiny_gguf(path, seed=1, kinds={"weight": request.param}, context_length=MAX_LEN)
    return load_model(path, EngineConfig(model="tiny", max_seq_len=MAX_LEN))


def random_tree(rng: np.random.Generator, size: int) -> Draft:
    parents = [int(rng.integers(max(-1, i - 4), i)) for i in range(size)]
    tokens = rng.permutation(96)[:size].astype(np.int32)  # all different, so siblings differ
    return Draft(tokens, np.array(parents, np.int32))


def path_to(draft: Draft, i: int) -> list[int]:
    path, parents = [], draft.parent_list()
    while i >= 0:
        path.append(i)
        i = parents[i]
    return path[::-1]


class Runner:
    def __init__(self, model: Model, *, max_rows: int) -> None:
        kv = KVPool.for_model(model.config, num_slots=4000, dtype=model.kv_dtype, device=model.device)
        self.executor = Executor(model, kv, max_rows=max_rows, max_len=MAX_LEN)
        self.free = list(np.random.default_rng(5).permutation(4000))

    def row(
        self, row_id: int, start: int, tokens: np.ndarray, slots: list[int], logits: int, **draft: object
    ) -> PlanRow:
        slots += [self.free.pop() for _ in range(start + len(tokens) - len(slots))]
        return PlanRow(row_id, row_id, start, tokens, np.array(slots, np.int32), 0, logits, **draft)

    def run(self, *rows: PlanRow) -> torch.Tensor:
        return self.executor.forward(StepPlan(0, rows)).whole().clone()


def check_same(ours: torch.Tensor, theirs: torch.Tensor, *, needs_torch: bool) -> None:
    """Bit-equal with our own products; torch's products may differ with the number of rows."""
    close = {"rtol": 1e-4, "atol": 1e-5} if needs_torch else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("lengths", [(5,), (1, 40), (530, 9, 514)])
def test_a_token_of_a_tree_has_the_logits_that_it_has_in_a_chain(model: Model, lengths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(lengths))
    trees = [random_tree(rng, size).in_preorder() for size in (9, 4, 6)][: len(lengths)]
    runner = Runner(model, max_rows=len(lengths))
    prompts = [rng.integers(0, 96, length).astype(np.int32) for length in lengths]
    slots: list[list[int]] = [[] for _ in lengths]
    for i, prompt in enumerate(prompts):
        if len(prompt) > 1:
            runner.run(runner.row(i, 0, prompt[:-1], slots[i], 0))
    rows = [
        runner.row(
            i,
            len(prompt) - 1,
            np.concatenate((prompt[-1:], tree.token_ids)),
            slots[i],
            len(tree) + 1,
            num_draft=len(tree),
            draft_parents=tree.parents,
        )
        for i, (prompt, tree) in enumerate(zip(prompts, trees, strict=True))
    ]
    found = runner.run(*rows)
    at = 0
    for i, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        for token in range(len(tree)):
            path = path_to(tree, token)
            # The chain's last token, over the KV that the tree wrote, and with the whole chain run again.
            kept = slots[i][: len(prompt)] + [slots[i][len(prompt) + j] for j in path[:-1]]
            last = runner.row(i, len(prompt) + len(path) - 1, tree.token_ids[token : token + 1], kept, 1)
            check_same(runner.run(last)[0], found[at + 1 + token], needs_torch=model.needs_torch_threads)
            whole = runner.row(
                i, len(prompt) - 1, np.append(prompt[-1:], tree.token_ids[path]), slots[i][: len(prompt) - 1], 1
            )
            check_same(runner.run(whole)[-1], found[at + 1 + token], needs_torch=model.needs_torch_threads)
        at += len(tree) + 1


@pytest.mark.parametrize("seed", range(20))
def test_the_branches_of_a_tree_hold_each_token_after_its_ancestors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    draft = random_tree(rng, int(rng.integers(1, 12)))
    order = draft.preorder()
    assert sorted(order) == list(range(len(draft)))
    ordered = draft.keep(order)
    texts = [[ordered.token_ids.item(j) for j in path_to(ordered, i)] for i in range(len(ordered))]
    assert texts == [[draft.token_ids.item(j) for j in path_to(draft, i)] for i in order]
    covered = []
    for begin, end, before in branches_of(np.array(ordered.parent_list())):
        covered += range(begin, end)
        assert path_to(ordered, end - 1) == [*before, *range(begin, end)]
    assert covered == list(range(len(ordered)))


def test_a_tree_without_forks_is_a_chain() -> None:
    tree = Draft(np.array([4, 5, 6], np.int32), np.array([-1, 0, 1], np.int32), "x")
    chain = tree.in_preorder()
    assert chain.parents is None and chain.token_ids.tolist() == [4, 5, 6] and chain.source == "x"
