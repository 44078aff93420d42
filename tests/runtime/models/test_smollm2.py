"""The real model: logits as in transformers, one greedy text however it is cut, and precisions that lose little."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from phloem.runtime.config import EngineConfig
from phloem.runtime.models import Model, load_model
from phloem.runtime.tokenizer import load_tokenizer
from phloem.tests.runtime.models.hf_reference import hf_from_gguf, hf_logits
from phloem.tests.runtime.models.stepping import Stepper, greedy

pytestmark = pytest.mark.model

NUM_TOKENS = 4
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about autumn rain.",
    "Why is the sky blue? Answer in one sentence.",
    "List three uses for a paper clip.",
    "Translate to Spanish: Good morning, how are you?",
    "def fibonacci(n):\n    ",
    "Summarize: The meeting was moved from Monday to Wednesday because the room was taken.",
    "Give me a JSON object with the keys name, age and city.",
    "What is 17 times 23?",
    "Who wrote Pride and Prejudice?",
    "Explain photosynthesis to a child.",
    "SELECT name FROM users WHERE",
    "Once upon a time, in a village by the sea,",
    "The three laws of motion are",
    "Is the following review positive or negative? 'The food was cold and the waiter rude.'",
    "Wie heißt die Hauptstadt von Österreich?",
    "1, 1, 2, 3, 5, 8,",
    "Name a fruit that is yellow.",
)


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> list[np.ndarray]:
    """Questions as chat turns, and the beginning of a long text."""
    tokenizer = load_tokenizer(smollm2_path)
    legal = (Path(__file__).parents[3] / "LICENSE").read_text()
    turns = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS]
    ids = [tokenizer.encode(text, special=True) for text in turns]
    return [np.array(each, dtype=np.int32) for each in (*ids, tokenizer.encode(legal)[:256])]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Model:
    return load_model(smollm2_path, EngineConfig(model="smollm2", precision="float32", max_seq_len=2048))


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> torch.nn.Module:
    return hf_from_gguf(smollm2_path)


@torch.no_grad()
def assert_greedy(reference: torch.nn.Module, prompt: np.ndarray, tokens: Sequence[int]) -> None:
    """Each token is transformers' likeliest after the prompt and the tokens before it."""
    whole = torch.tensor([[*prompt.tolist(), *tokens[:-1]]])
    logits = reference(whole, logits_to_keep=len(tokens), use_cache=False).logits[0]
    assert logits.argmax(dim=-1).tolist() == list(tokens)


def test_logits_are_those_of_transformers(model: Model, reference: torch.nn.Module, prompts: list[np.ndarray]) -> None:
    ids = prompts[18]
    want = hf_logits(reference, ids)
    got = Stepper(model).prefill(0, ids, chunk=64)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_greedy_text_is_that_of_transformers_alone_and_in_batches(
    model: Model, reference: torch.nn.Module, prompts: list[np.ndarray]
) -> None:
    batched = greedy(model, prompts[:8], NUM_TOKENS, chunk=16)
    for i, (prompt, tokens) in enumerate(zip(prompts[:8], batched, strict=True)):
        assert_greedy(reference, prompt, tokens)
        if i % 5 == 0:
            assert greedy(model, [prompt], NUM_TOKENS) == [tokens]


@pytest.fixture(scope="module")
def exact(model: Model, prompts: list[np.ndarray]) -> torch.Tensor:
    return Stepper(model).prefill(0, prompts[18])


@pytest.mark.parametrize("precision", ["bfloat16", "auto"])
def test_fast_precisions_cost_little(
    precision: str, exact: torch.Tensor, smollm2_path: Path, prompts: list[np.ndarray]
) -> None:
    """On real text the perplexity stays within 3%, and the likeliest token is mostly the same."""
    config = EngineConfig(model="smollm2", precision=precision, max_seq_len=2048)  # type: ignore[arg-type]
    model = load_model(smollm2_path, config)
    ids = prompts[18]
    following = torch.from_numpy(ids[1:].astype(np.int64))
    for chunk, length in ((256, 256), (4, 128)):
        fast, wanted = Stepper(model).prefill(0, ids[:length], chunk=chunk), exact[:length]
        losses = [torch.nn.functional.cross_entropy(x[:-1], following[: length - 1]) for x in (wanted, fast)]
        assert abs(float(losses[1] - losses[0])) < 0.03, chunk
        assert (fast.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean() > 0.93, chunk


def test_a_loaded_model_keeps_nothing_of_its_file_mapped(smollm2_path: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux says what is mapped")
    before = maps.read_text().count(smollm2_path.name)
    model = load_model(smollm2_path, EngineConfig(model=str(smollm2_path), max_seq_len=64))
    assert model.layers and maps.read_text().count(smollm2_path.name) <= before
