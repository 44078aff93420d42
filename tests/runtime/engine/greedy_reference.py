"""Greedy texts of transformers after twenty prompts, in float32, kept in tests/data.

    python -m phloem.tests.runtime.engine.greedy_reference smollm2 SmolLM2-135M-Instruct.Q4_1.gguf

makes a model's file anew, from another folder than the repository's root (whose ``kernels`` transformers would take for
a package of that name). The logits themselves are compared live, in tests/runtime/models/test_smollm2.py.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from phloem.benchmarks.prose import DOCUMENT

DATA = Path(__file__).parents[2] / "data"
NUM_TOKENS = 12  # of SmolLM2
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Q: How many days are there in a leap year?\nA:",
    "Translate to French: Good morning.\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, age FROM users WHERE",
    '{"name": "Ada", "born": 1815, "field":',
    "Ingredients:\n- 200 g flour\n- 2 eggs\n-",
    "Water boils at a temperature of",
    "Die Hauptstadt von Deutschland ist",
    "import numpy as np\n\nx = np.",
    "Summary of the text above:",
    DOCUMENT[:1200] + "\n\nQuestion: who planted the orchard?\nAnswer:",
    DOCUMENT[800:2600] + "\n\nIn one sentence:",
    DOCUMENT[2000:5000] + "\n\nThe main idea is",
    DOCUMENT[:6000],
    (DOCUMENT + DOCUMENT)[:8200],
]
# The longest is longer than Gemma's window of 512 tokens.
GEMMA3_PROMPTS = [*PROMPTS[:18], "東京は日本の", "A list\t with  spaces:\n\n\n  - 3 apples 🍎\n"]
GEMMA3_TOKENS = 48
SETS = {"smollm2": (PROMPTS, NUM_TOKENS), "gemma3-270m": (GEMMA3_PROMPTS, GEMMA3_TOKENS)}


@dataclass(frozen=True, slots=True)
class Greedy:
    """The prompt's tokens, the tokens after it, and each one's logit minus that of the second-best token."""

    prompt_ids: list[int]
    token_ids: list[int]
    margins: list[float]


def expected(model: str = "smollm2") -> list[Greedy]:
    return [Greedy(**entry) for entry in json.loads(_file(model).read_text())]


def make(model: str, path: Path) -> None:
    """By transformers' tokenizer, and its model on weights that ggml's package unpacks, not by the runtime."""
    import torch
    import transformers
    from phloem.tests.runtime.models.hf_reference import hf_from_gguf

    prompts, num_tokens = SETS[model]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reference = hf_from_gguf(path)
    made = []
    for prompt in prompts:
        ids = tokenizer(prompt).input_ids
        with torch.inference_mode():
            out = reference.generate(
                torch.tensor([ids]),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tops = [step[0].topk(2).values.tolist() for step in out.logits]
        margins = [round(first - second, 6) for first, second in tops]
        made.append({"prompt_ids": ids, "token_ids": out.sequences[0, len(ids) :].tolist(), "margins": margins})
    DATA.mkdir(exist_ok=True)
    _file(model).write_text("[\n" + ",\n".join(json.dumps(entry) for entry in made) + "\n]\n")


def _file(model: str) -> Path:
    return DATA / f"{model.replace('-', '_')}_greedy.json"


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
