"""Hugging Face ``generate`` in bfloat16; requests that arrive together run as one batch. See ``benchmarks.peers``."""

import sys
import time
from pathlib import Path

import torch
import transformers
from lines import read_requests, take_stdout  # beside this script

MAX_BATCH = 16
GATHER_S = 0.03  # time to wait for further requests of a batch


def main() -> None:
    say = take_stdout()
    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    incoming = read_requests()
    say({"ready": f"transformers {transformers.__version__}, bfloat16"})
    while (item := incoming.get()) is not None:
        batch = [item]
        time.sleep(GATHER_S)
        while len(batch) < MAX_BATCH and not incoming.empty():
            other = incoming.get()
            if other is None:
                return
            batch.append(other)
        for answer in generate(model, tokenizer, batch):
            say(answer)


@torch.inference_mode()
def generate(model: object, tokenizer: object, batch: list[tuple[float, dict]]) -> list[dict]:
    texts = [
        asked.get("text")
        or tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)
        for _, asked in batch
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    count, exact = batch[0][1]["max_tokens"], batch[0][1]["to_the_end"]
    seen: list[float] = []
    out = model.generate(
        **inputs,
        max_new_tokens=count,
        min_new_tokens=count if exact else None,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        stopping_criteria=[lambda *_, **__: seen.append(time.perf_counter()) or torch.zeros(len(batch), dtype=bool)],
    )
    prompt_len = inputs["input_ids"].shape[1]
    answers = []
    for row, (start_s, asked), mask in zip(out, batch, inputs["attention_mask"], strict=True):
        tokens = [token for token in row[prompt_len:].tolist() if exact or token != tokenizer.pad_token_id]
        answers.append(
            {
                "id": asked["id"],
                "text": tokenizer.decode(tokens, skip_special_tokens=True),
                "prompt_tokens": int(mask.sum()),
                "completion_tokens": len(tokens),
                "first_s": seen[0] - start_s,
                "last_s": seen[-1] - start_s,
            }
        )
    return answers


if __name__ == "__main__":
    main()
