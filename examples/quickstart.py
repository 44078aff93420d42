"""One program, one real model: gen, select, fork, a JSON answer and a two-turn chat, and what it all cost.

python examples/quickstart.py            # or: make demo
"""

import argparse
import json

import phloem
from phloem import assistant, function, gen, select, system, user
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

CITY_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "founded": {"type": "integer", "minimum": -3000, "maximum": 2026},
        "coastal": {"type": "boolean"},
    },
    "required": ["city", "country", "founded", "coastal"],
    "additionalProperties": False,
}


@function
def chat(s, first, second):
    """Two turns; the second one's prompt is found in the cache, generated tokens included."""
    s += system("You are a helpful assistant who answers in one short sentence.")
    s += user(first)
    s += assistant(gen("answer_1", max_tokens=40, temperature=0))
    s += user(second)
    s += assistant(gen("answer_2", max_tokens=40, temperature=0))


@function
def judge(s, review):
    """A choice between given words, by their probability: one prefill, nothing decoded."""
    s += "Review: The soup was cold and the waiter rude.\nSentiment: negative\n\n"
    s += "Review: A lovely evening, we will come back.\nSentiment: positive\n\n"
    s += f"Review: {review}\nSentiment:"
    s += select("sentiment", choices=[" positive", " negative"])


@function
def brainstorm(s, topic):
    """Three branches of one prompt decode together, then their answers are pasted without coming back to Python."""
    s += system("You are a helpful assistant who answers in one short sentence.")
    s += user(f"Give a tip about {topic}.")
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += assistant(f"Tip {i + 1}:" + gen("tip", max_tokens=24, temperature=0.7, stop=["\n", ". "], seed=i))
    forks.join()
    s += assistant("Here are three tips.")
    s += user("Repeat the best of them:\n" + "\n".join("-" + tip for tip in s["tip"]))
    s += assistant(gen("best", max_tokens=32, temperature=0, stop="\n"))


@function
def describe(s, city):
    """JSON that follows a schema because no other token can be chosen."""
    s += system("You answer in JSON.")
    s += user(
        f"Describe the city of {city}: city, country, year in which it was founded, and whether it is on a coast."
    )
    s += assistant(gen("json", max_tokens=100, temperature=0, json_schema=json.dumps(CITY_SCHEMA)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    console = Console(highlight=False)
    with console.status("loading the model"):
        runtime = phloem.Runtime(model=parser.parse_args().model)
    with runtime:
        phloem.set_default_backend(runtime)
        states = {}

        console.rule("two turns of chat")
        states["chat"] = s = chat.run("What is the capital of France?", "And of Italy?")
        console.print(f"[bold]What is the capital of France?[/]  {s['answer_1'].strip()}")
        console.print(f"[bold]And of Italy?[/]  {s['answer_2'].strip()}")

        console.rule("select")
        for review in ("I loved every minute of it.", "What a waste of money."):
            states["judge"] = s = judge.run(review)
            console.print(f"[bold]{review}[/] {s['sentiment']}")

        console.rule("fork and join")
        states["brainstorm"] = s = brainstorm.run("staying healthy")
        for i, tip in enumerate(s["tip"]):
            console.print(f"[bold]tip {i + 1}[/]{tip.rstrip()}")
        console.print(f"[bold]best[/]  {s['best'].strip()}")

        console.rule("JSON by schema")
        states["describe"] = s = describe.run("Lisbon")
        console.print_json(s["json"])

        console.rule("what each program cost")
        counts = ("messages", "prompt_tokens", "cached_tokens", "prefilled_tokens", "generated_tokens", "forwards")
        table = Table("program", *(name.replace("_", " ") for name in counts))
        for name, state in states.items():
            stats = state.stats()
            table.add_row(name, *(str(stats[count]) for count in counts))
        console.print(table)

        console.rule("the tree of cached prefixes")
        tree = Tree("KV cache")
        for root in runtime.cache_tree():
            for child in root["children"]:
                grow(tree, child)
        console.print(tree)


def grow(tree: Tree, node: dict) -> None:
    text = node["text"].replace("\n", "\\n").replace("[", r"\[")
    branch = tree.add(
        f"[dim]{node['tokens']:>4} tokens, used {node['hits']}x[/] {text}{'' if node['is_whole'] else '...'}"
    )
    for child in node["children"]:
        grow(branch, child)


if __name__ == "__main__":
    main()
