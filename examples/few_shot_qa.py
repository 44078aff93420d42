"""Few-shot question answering: solved examples first, then one short line per question.

The examples are one prefix, computed once for all questions; ``stop`` ends each answer with its line.

python examples/few_shot_qa.py
"""

import phloem
from phloem import function, gen

EXAMPLES = """\
Question: Which animal says moo?
Answer: a cow

Question: What do you use to cut paper?
Answer: scissors

Question: What falls from the sky when it is cold?
Answer: snow

"""
QUESTIONS = {
    "What is the capital of France?": "paris",
    "How many days has a week?": "7",
    "What colour is grass?": "green",
    "What do bees make?": "honey",
    "Which planet do we live on?": "earth",
    "What do you call frozen water?": "ice",
}


@function
def answer(s, question):
    s += EXAMPLES
    s += f"Question: {question}\nAnswer:"
    s += gen("answer", max_tokens=12, stop="\n", temperature=0)


def main(runtime):
    states = answer.run_batch([{"question": question} for question in QUESTIONS], backend=runtime)
    right = 0
    for (question, expected), state in zip(QUESTIONS.items(), states, strict=True):
        text = state["answer"].strip()
        right += expected in text.lower()
        print(f"{question}  {text}")
    print(f"{right} of {len(QUESTIONS)} right")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
