"""Three programs, one real model: a chat of two turns, forks with a choice in each, a JSON answer, and their tokens.

python examples/quickstart.py            # or: make demo, make demo MODEL=qwen2.5-coder-1.5b
"""

import argparse
import json

import phloem
from phloem import assistant, function, gen, select, system, user
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

ORDER_SCHEMA = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 30},
        "item": {"type": "string", "maxLength": 30},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
        "price": {"type": "number", "minimum": 0, "maximum": 9999},
    },
    "required": ["customer", "item", "quantity", "price"],
    "additionalProperties": False,
}
LABELS = {
    "topic": ["food", "travel", "sport", "work"],
    "mood": ["happy", "angry"],
    "language": ["English", "French", "German"],
}


@function
def chat(s, first, second):
    """Two turns; the second one's prompt is found in the cache, generated tokens included."""
    s += system("You answer in one short sentence.")
    s += user(first)
    s += assistant(gen("answer_1", max_tokens=40, temperature=0))
    s += user(second)
    s += assistant(gen("answer_2", max_tokens=40, temperature=0))


@function
def label(s, text):
    """Three branches of one prompt, each a choice between words by their probability: nothing is decoded."""
    s += "text: The train to Lyon was two hours late.\ntopic: travel\nmood: angry\nlanguage: English\n\n"
    s += "text: Das Brot war warm und die Suppe wunderbar.\ntopic: food\nmood: happy\nlanguage: German\n\n"
    s += f"text: {text}\n"
    branches = s.fork(len(LABELS))
    for branch, (name, choices) in zip(branches, LABELS.items(), strict=True):
        branch += f"{name}: " + select(name, choices=choices)
    branches.join()


@function
def order(s, text):
    """JSON that follows a schema, because no other token can be chosen."""
    s += system("You turn orders into JSON.")
    s += user("Please send 2 red lamps to Mary Jones. She pays 15 euros for each.")
    s += assistant('{"customer": "Mary Jones", "item": "red lamp", "quantity": 2, "price": 15}')
    s += user(text)
    s += assistant(gen("json", max_tokens=100, temperature=0, json_schema=json.dumps(ORDER_SCHEMA)))


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
        questions = ("What is the capital of France?", "Which river runs through it?")
        states["chat"] = s = chat.run(*questions)
        for question, name in zip(questions, ("answer_1", "answer_2"), strict=True):
            console.print(f"[bold]{question}[/] {s[name].strip()}")

        console.rule("fork and select")
        for text in ("The pizza was cold and the waiter rude.", "Le vol était agréable et le repas délicieux."):
            states["label"] = s = label.run(text)
            console.print(f"[bold]{text}[/] {', '.join(s[name][0] for name in LABELS)}")

        console.rule("JSON by schema")
        text = "Please send 3 wooden tables to Paul Martin. He pays 250 euros for each."
        states["order"] = s = order.run(text)
        console.print(f"[bold]{text}[/]\n{s['json']}")

        console.rule("tokens of each program")
        table = Table("program")
        for column in ("messages", "prompt", "cached", "computed", "generated", "steps"):
            table.add_column(column, justify="right")
        for name, state in states.items():
            stats = state.stats()
            counts = ("messages", "prompt_tokens", "cached_tokens", "prefilled_tokens", "generated_tokens", "forwards")
            table.add_row(name, *(str(stats[count]) for count in counts))
        console.print(table)

        console.rule("the tree of cached prefixes")
        tree = Tree("KV cache")
        for root in runtime.cache_tree():
            for child in root["children"]:
                grow(tree, child)
        console.print(tree)


def grow(tree: Tree, node: dict) -> None:
    label = Text(f"{node['tokens']:>3} tokens, used {node['hits']}x ", style="dim", no_wrap=True, overflow="ellipsis")
    label.append(node["text"].replace("\n", "\\n") + ("" if node["is_whole"] else "..."), style="not dim")
    branch = tree.add(label)
    for child in node["children"]:
        grow(branch, child)


if __name__ == "__main__":
    main()
