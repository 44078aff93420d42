"""Decoders: a vote over many reasonings, the best of several texts, beam search, and how sure the model is.

Each tries several ways on in forks that share the prompt, and goes on with one of them.

python examples/decoding.py
"""

import phloem
from phloem import beam, best_of, distribution, function, gen, vote

SUMS = """\
Q: Tom has 3 apples and buys 2 more. How many has he?
A: 3 + 2 = 5. The answer is 5.

Q: Two boxes hold 6 eggs each. How many eggs are there?
A: 2 * 6 = 12. The answer is 12.

"""


@function
def solve(s, question):
    s += SUMS + f"Q: {question}\nA:"
    with s.sampling(temperature=0.6):
        reasoning = gen("reasoning", max_tokens=20, stop=" The answer") + " The answer is " + gen("answer", int)
        s += vote(reasoning, 12, on="answer", name="vote")


SLOGANS = "Slogan for a shoe shop: 'Walk on air.'\nSlogan for a bank: 'Your money sleeps well here.'\n"


@function
def slogan(s, thing):
    s += SLOGANS + f"Slogan for a {thing}: '"
    s += best_of(gen("sampled", max_tokens=12, stop=["'", "\n"]), 6, name="best")


@function
def slogan_by_beam(s, thing):
    s += SLOGANS + f"Slogan for a {thing}: '" + beam("searched", width=4, max_tokens=12, stop=["'", "\n"])


@function
def mood(s, review):
    s += "Review: Great soup!\nMood: happy.\n\nReview: Cold and late.\nMood: angry.\n\n"
    s += "Review: " + review + "\nMood:" + distribution("mood", [" happy.", " angry."])


def main(runtime):
    solved = solve.run("Mia has 7 books and gets 4 more. How many has she?", seed=7, backend=runtime)
    told = solved.get_meta_info("vote")
    print(f"vote: {solved['answer']} with {told['share']:.0%} of {dict(told['votes'])}")

    sampled, searched = (program.run("bakery", seed=3, backend=runtime) for program in (slogan, slogan_by_beam))
    scores = sampled.get_meta_info("best")["scores"]
    print(f"best of {len(scores)}: {sampled['sampled'].strip()} ({max(scores):.2f}, the worst {min(scores):.2f})")
    for found in searched.get_meta_info("searched")["beams"]:
        print(f"beam: {found['text'].strip()} ({found['score']:.2f})")

    nothing = mood.run("N/A", backend=runtime)["mood"]  # what the model says where the review says nothing
    for review in ("They were so kind.", "My fish was raw."):
        found = mood.run(review, backend=runtime)["mood"]
        honest = found.calibrated(prior=nothing)
        print(f"{review} happy {found[' happy.']:.0%}, calibrated {honest[' happy.']:.0%}")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
