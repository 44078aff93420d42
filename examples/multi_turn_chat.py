"""Several conversations at once: each turn finds its whole history, answers included, in the cache.

python examples/multi_turn_chat.py
"""

import phloem
from phloem import assistant, function, gen, system, user

CHATS = {
    "cities": ["What is the capital of Italy?", "What is it famous for?", "What do people eat there?"],
    "animals": ["Which animal is the largest?", "Where does it live?", "What does it eat?"],
}


@function
def chat(s, questions):
    s += system("You are a helpful assistant who answers in one short sentence.")
    for i, question in enumerate(questions):
        s += user(question)
        s += assistant(gen(f"answer_{i}", max_tokens=40, stop="\n", temperature=0))


def main(runtime):
    states = chat.run_batch([{"questions": questions} for questions in CHATS.values()], backend=runtime)
    for (topic, questions), state in zip(CHATS.items(), states, strict=True):
        print(f"-- {topic}")
        for i, question in enumerate(questions):
            meta = state.get_meta_info(f"answer_{i}")
            print(f"{question}\n  {state[f'answer_{i}'].strip()}")
            print(f"  [{meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens cached]")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
