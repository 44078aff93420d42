"""ReAct agents: a thought, an action by one of the tools, and the tool's text, three times; then an answer.

Yao et al., 2022. The tools read Python's own documentation, so each observation adds about 100 tokens to the prompt.
"""

import random
import re
from typing import Any

from phloem import assistant, function, gen, system, user

from . import workload as w
from .texts import tag, tool_pages, towns

STEPS, THOUGHT_TOKENS, ANSWER_TOKENS = 3, 32, 32
PAGES = tool_pages()
ACTION = "(Open|Search)\\[(" + "|".join(PAGES) + ")\\]"
ACT = "Which action?"


def observe(action: str) -> str:
    """What the tool of ``action`` returns: a page, or the names of pages that mention a function's words."""
    tool, _, name = action.rstrip("]").partition("[")
    if tool == "Open":
        return f"Observation: {PAGES[name]}"
    words = set(re.findall("[a-z]{4,}", PAGES[name].lower()))
    near = sorted(PAGES, key=lambda page: (-len(words & set(re.findall("[a-z]{4,}", PAGES[page].lower()))), page))
    return "Observation: " + "; ".join(f"{page}: {PAGES[page][:80]}" for page in near[:4])


@function
def program(s: Any, rules: str, task: str) -> None:
    s += system(rules)
    s += user(task)
    for _ in range(STEPS):
        s += assistant(gen("thought", max_tokens=THOUGHT_TOKENS))
        s += user(ACT)
        s += assistant(gen("action", max_tokens=32, regex=ACTION))
        s += user(observe(s["action"]))
    s += assistant(gen("answer", max_tokens=ANSWER_TOKENS))


async def plain(client: w.Client, rules: str, task: str) -> str:
    messages = [w.system(rules), w.user(task)]
    for _ in range(STEPS):
        messages.append(w.assistant(await client.chat(messages, THOUGHT_TOKENS)))
        messages.append(w.user(ACT))
        action = await client.chat(messages, 32, regex=ACTION)
        messages += [w.assistant(action), w.user(observe(action))]
    return await client.chat(messages, ANSWER_TOKENS)


def make(seed: int, n: int) -> list[w.Case]:
    rng = random.Random(seed)
    tools = "\n".join(f"- {name}: {text[:60]}" for name, text in PAGES.items())
    pages = rng.sample(sorted(PAGES), 4)
    examples = "\n\n".join(
        f"Task: explain {page}.\nThought: I open its page.\nAction: Open[{page}]\nObservation: {PAGES[page][:200]}"
        for page in pages
    )
    rules = (
        f"Agent {tag(rng)}. You answer questions about Python with two tools. Open[NAME] shows the page of a function; "
        f"Search[NAME] lists similar ones. The functions:\n{tools}\n\nSolved tasks:\n\n{examples}"
    )
    askers = towns(rng, n)
    tasks = [f"{who.mayor} of {who.name} asks: what does {rng.choice(sorted(PAGES))} do?" for who in askers]
    return [w.Case({"rules": rules, "task": task}) for task in tasks]


WORKLOAD = w.Workload(
    name="react",
    source="ReAct, Yao et al., 2022; three steps",
    make=make,
    program=program,
    plain=plain,
    count=4,
    quick=1,
    free_tokens=STEPS * THOUGHT_TOKENS + ANSWER_TOKENS,
    needs_grammar=True,
)
