"""Greedy text of transformers after twenty prompts (SmolLM2-135M-Instruct, float32), kept in tests/data.

    python -m phloem.tests.runtime.engine.greedy_reference SmolLM2-135M-Instruct.Q4_1.gguf

makes the file anew; it takes about a minute on two quiet cores. The logits themselves are compared live, in
tests/runtime/models/test_smollm2.py.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from phloem.benchmarks.prose import DOCUMENT

FILE = Path(__file__).parents[2] / "data" / "smollm2_greedy.json"
NUM_TOKENS = 12
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


@dataclass(frozen=True, slots=True)
class Greedy:
    """The prompt's tokens, the next ``NUM_TOKENS``, and each one's logit minus that of the second-best token."""

    prompt_ids: list[int]
    token_ids: list[int]
    margins: list[float]


def expected() -> list[Greedy]:
    return [Greedy(**entry) for entry in json.loads(FILE.read_text())]


def make(path: Path) -> None:
    import torch
    from phloem.runtime.tokenizer import load_tokenizer
    from phloem.tests.runtime.models.hf_reference import hf_from_gguf

    model, tokenizer = hf_from_gguf(path), load_tokenizer(path)
    made = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tops = [step[0].topk(2).values.tolist() for step in out.logits]
        margins = [round(first - second, 6) for first, second in tops]
        made.append({"prompt_ids": ids, "token_ids": out.sequences[0, len(ids) :].tolist(), "margins": margins})
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in made) + "\n]\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
