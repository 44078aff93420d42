"""A conversation that streams: each turn finds all earlier ones in the cache, its own answers included.

python examples/chat.py "What is a tree?" "And a forest?"
"""

import argparse

import phloem
from phloem import assistant, function, gen, system, user


@function
def conversation(s, questions):
    s += system("You are a friendly assistant. Answer in one or two short sentences.")
    for i, question in enumerate(questions):
        s += user(question)
        s += assistant(gen(f"answer_{i}", max_tokens=48, temperature=0))


def main(model: str, questions: list[str]) -> None:
    with phloem.Runtime(model=model) as runtime:
        state = conversation.run(questions, stream=True, backend=runtime)
        for i, question in enumerate(questions):
            print(f"> {question}")
            for piece in state.text_iter(f"answer_{i}"):
                print(piece, end="", flush=True)
            meta = state.get_meta_info(f"answer_{i}")
            print(f"\n  [{meta['prompt_tokens']} prompt tokens, {meta['cached_tokens']} of them cached]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "questions", nargs="*", default=["What is a tree?", "Name one that keeps its leaves in winter."]
    )
    parser.add_argument("--model", default="smollm2")
    arguments = parser.parse_args()
    main(arguments.model, arguments.questions)
