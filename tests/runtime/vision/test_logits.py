"""Logits of prompts with images are those of transformers, float32, however steps are cut."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from phloem.radix_cache import FIRST_CONTENT_ID, Contents
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor import Executor
from phloem.runtime.memory import KVPool
from phloem.runtime.models import load_model
from phloem.runtime.scheduler.plan import PlanRow, StepPlan
from phloem.runtime.tokenizer import load_tokenizer
from phloem.runtime.vision.decoding import decode_pixels, open_image
from phloem.runtime.vision.images import Images
from phloem.runtime.vision.model import load_vision
from phloem.runtime.vision.prompt import ImagePrompt
from phloem.runtime.vision.tiles import Grid, normalised, tiles_of
from phloem.tests.runtime.vision.tiny_vision import IMAGE_TOKEN, hash_of, make_tiny_vision, picture

FLOAT32 = EngineConfig(model="tiny", precision="float32")
SMALL, WIDE, TALL = picture(1, size=(12, 12)), picture(2, size=(40, 30)), picture(3, size=(20, 60))


class Runner:
    """Runs sequences of texts and images by hand, one step plan after another."""

    def __init__(self, folder, **options) -> None:
        self.model = load_model(folder, FLOAT32)
        self.tokenizer = load_tokenizer(folder)
        vision = load_vision(folder, FLOAT32, hidden_size=64)
        self.form = vision.config.form
        self.images = Images(vision, ImagePrompt.of(vision.config, self.tokenizer), Contents(), **options)
        self.kv = KVPool.for_model(self.model.config, num_slots=1024, dtype=self.model.kv_dtype)
        self.executor = Executor(self.model, self.kv, max_rows=4, max_len=512, contents=self.images)
        self.free = iter(np.random.default_rng(0).permutation(1024).tolist())
        self.slots: dict[int, list[int]] = {}
        self.pictures = []

    def ids(self, *parts: str | bytes) -> np.ndarray:
        found = []
        for part in parts:
            if isinstance(part, str):
                found += self.tokenizer.encode(part)
                continue
            one = self.images.hold(hash_of(part), part)
            self.pictures.append(one)
            grid = self.images.read(one, num_left=512, is_wanted=lambda: True)
            found += self.images.token_ids(one, grid).tolist()
        return np.array(found, np.int32)

    def step(self, *rows: tuple[int, np.ndarray]) -> torch.Tensor:
        made = []
        for sequence, token_ids in rows:
            slots = self.slots.setdefault(sequence, [])
            start = len(slots)
            slots.extend(next(self.free) for _ in token_ids)
            all_slots = np.array(slots, np.int32)
            made.append(PlanRow(sequence, sequence, start, token_ids, all_slots, 0, len(token_ids)))
        return self.executor.forward(StepPlan(0, tuple(made))).whole().clone()

    def wanted(self, reference: torch.nn.Module, *parts: str | bytes) -> torch.Tensor:
        """transformers' logits of the same parts."""
        ids = self.ids(*parts)
        shown = np.where(ids >= FIRST_CONTENT_ID, IMAGE_TOKEN, ids)
        tiles = [tiles_of(decode_pixels(open_image(part)), self.form)[1] for part in parts if isinstance(part, bytes)]
        pixels = torch.from_numpy(normalised(np.concatenate(tiles), self.form))
        with torch.no_grad():
            return reference(torch.from_numpy(shown.astype(np.int64))[None], pixel_values=pixels[None]).logits[0]


@pytest.fixture(scope="module")
def runner(vision_folder) -> Runner:
    return Runner(vision_folder)


@pytest.fixture(autouse=True)
def empty(runner: Runner) -> None:
    runner.free = iter(np.random.default_rng(0).permutation(1024).tolist())
    runner.slots.clear()


def assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize(
    "parts",
    [("one ", SMALL, " small"), (SMALL, "two", WIDE, "!"), ("tiles", TALL), (WIDE, TALL, SMALL, " three")],
    ids=["one", "two", "tiles", "three"],
)
def test_logits_are_those_of_transformers(runner: Runner, reference, parts: tuple[str | bytes, ...]) -> None:
    want = runner.wanted(reference, *parts)
    ids = runner.ids(*parts)
    assert_equal(runner.step((0, ids)), want)
    for chunk in (3, 16):  # 3: chunks begin and end inside a tile, and of some only image tokens are left
        runner.slots.clear()
        got = [runner.step((0, ids[at : at + chunk])) for at in range(0, len(ids), chunk)]
        assert_equal(torch.cat(got), want)


def test_smolvlm_is_read_as_idefics3(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "tiny", model_type="smolvlm", seed=3)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ours = Runner(folder)
    assert type(theirs).__name__.startswith("SmolVLM")
    assert_equal(ours.step((0, ours.ids("x", WIDE, "?"))), ours.wanted(theirs, "x", WIDE, "?"))


def test_a_batch_of_different_images_and_texts(runner: Runner, reference) -> None:
    prompts = [("a", SMALL, "x"), ("ab", WIDE), ("no image at all here",), (SMALL, "and ", TALL)]
    ids = [runner.ids(*parts) for parts in prompts]
    firsts = [one[: len(one) // 2] for one in ids]
    got = [runner.step(*enumerate(firsts)), runner.step(*((i, one[len(one) // 2 :]) for i, one in enumerate(ids)))]
    lengths = [len(first) for first in firsts], [len(one) - len(one) // 2 for one in ids]
    halves = [part.split(size) for part, size in zip(got, map(list, lengths), strict=True)]
    for i in (0, 1, 3):
        assert_equal(torch.cat((halves[0][i], halves[1][i])), runner.wanted(reference, *prompts[i]))


def test_logits_after_a_shared_prefix_with_an_image(runner: Runner, reference) -> None:
    prefix, first, second = runner.ids("see ", WIDE), runner.ids(" cat?"), runner.ids(" dog?")
    runner.step((0, prefix))
    runner.slots[1] = list(runner.slots[0])
    got = runner.step((0, first), (1, second))
    assert_equal(got[: len(first)], runner.wanted(reference, "see ", WIDE, " cat?")[-len(first) :])
    assert_equal(got[len(first) :], runner.wanted(reference, "see ", WIDE, " dog?")[-len(second) :])


def test_vectors_that_did_not_fit_are_encoded_again(vision_folder, reference, caplog) -> None:
    runner = Runner(vision_folder, max_bytes=1)
    parts = (SMALL, WIDE, " both")
    ids = runner.ids(*parts)
    assert runner.images.num_encoded == 2
    assert_equal(runner.step((0, ids)), runner.wanted(reference, *parts))
    assert runner.images.num_encoded > 2 and "is encoded again, in a step" in caplog.text


def test_tokens_are_those_of_the_processor(runner: Runner) -> None:
    prompt = ImagePrompt(runner.tokenizer, image_token_id=IMAGE_TOKEN, tokens_a_tile=2)
    around, whole, image = "<fake_token_around_image>", "<global-img>", "<image>"
    want = "".join(
        [
            f"{around}<row_1_col_1>{image * 2}{around}<row_1_col_2>{image * 2}\n",
            f"{around}<row_2_col_1>{image * 2}{around}<row_2_col_2>{image * 2}\n",
            f"\n{around}{whole}{image * 2}{around}",
        ]
    )
    ids = prompt.token_ids(Grid(2, 2), FIRST_CONTENT_ID)
    shown = np.where(ids >= FIRST_CONTENT_ID, IMAGE_TOKEN, ids)
    assert shown.tolist() == runner.tokenizer.encode(want, special=True)
    assert ids[ids >= FIRST_CONTENT_ID].tolist() == [FIRST_CONTENT_ID + i for i in range(10)]
    alone = prompt.token_ids(Grid(0, 0), FIRST_CONTENT_ID)
    assert len(alone) == 5 and alone[2:4].tolist() == [FIRST_CONTENT_ID, FIRST_CONTENT_ID + 1]
