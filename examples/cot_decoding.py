"""Chain-of-thought decoding (Wang and Zhou, 2024): branch on the first token, then trust the surest answer.

Greedy text often skips the reasoning that the second or third likeliest first token would begin. Confidence is the mean
gap between the two likeliest tokens along a branch, read from its log-probabilities.

python examples/cot_decoding.py
"""

import math

import phloem
from phloem import function, gen


@function
def cot_decoding(s, question, branches=5):
    s += f"Question: {question}\nAnswer:"
    (look,) = s.fork(1)
    # heal=False: the next token itself, not the prompt's last ones written anew
    look += gen("first", max_tokens=1, temperature=0, return_logprob=True, top_logprobs_num=branches, heal=False)
    top = [token for token in look.get_meta_info("first")["output_top_logprobs"][0] if "<|" not in token[2]]
    forks = s.fork(len(top))
    for fork, (_, _, text) in zip(forks, top, strict=True):
        fork += text
        fork += gen("rest", max_tokens=40, stop="\n", temperature=0, return_logprob=True, top_logprobs_num=2)
    s["answers"] = [
        (confidence(fork.get_meta_info("rest")), text + fork["rest"])
        for fork, (_, _, text) in zip(forks, top, strict=True)
    ]


def confidence(meta):
    """The mean gap between the probabilities of the likeliest and the second likeliest token."""
    gaps = [math.exp(first[0]) - math.exp(second[0]) for first, second in meta["output_top_logprobs"]]
    return sum(gaps) / max(len(gaps), 1)


def main(runtime):
    question = "I have 3 apples, my father has 2 more than me. How many do we have together?"
    print(question)
    for sure, answer in sorted(cot_decoding.run(question, backend=runtime)["answers"], reverse=True):
        print(f"{sure:.2f} {answer.strip()}")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
