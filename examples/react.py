"""ReAct (Yao et al., 2022): thoughts and actions by the model, observations by real tools, until it finishes.

A regex allows the tools' names and an argument in brackets, so every action can be carried out.

python examples/react.py
"""

import ast
import operator

import phloem
from phloem import function, gen

CAPITALS = {"france": "Paris", "germany": "Berlin", "italy": "Rome", "spain": "Madrid", "japan": "Tokyo"}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXAMPLES = """\
Question: What is the capital of Spain?
Thought: I look up Spain.
Action: Lookup[Spain]
Observation: Madrid
Thought: The answer is Madrid.
Action: Finish[Madrid]

Question: What is 12 times 12?
Thought: I calculate 12 * 12.
Action: Calculate[12 * 12]
Observation: 144
Thought: The answer is 144.
Action: Finish[144]

Question: What is the capital of Italy?
Thought: I look up Italy.
Action: Lookup[Italy]
Observation: Rome
Thought: The answer is Rome.
Action: Finish[Rome]

"""


def lookup(country):
    return CAPITALS.get(country.strip().lower(), f"{country} is not in the list")


def calculate(text):
    """The four operations on numbers, and nothing else."""

    def value(node):
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError(text)

    try:
        return f"{value(ast.parse(text, mode='eval').body):g}"
    except (SyntaxError, ValueError, ZeroDivisionError):
        return f"{text} cannot be calculated"


@function
def react(s, question, max_steps=5):
    s += EXAMPLES + f"Question: {question}\n"
    for _ in range(max_steps):
        s += "Thought:" + gen("thought", max_tokens=40, stop="\n", temperature=0) + "\nAction: "
        s += gen("action", regex=r"(Lookup|Calculate|Finish)\[[A-Za-z0-9 .+*/-]{1,30}\]", temperature=0)
        name, _, argument = s["action"].rstrip("]").partition("[")
        if name == "Finish":
            return argument
        s += f"\nObservation: {lookup(argument) if name == 'Lookup' else calculate(argument)}\n"
    return None


def main(runtime):
    for question in ("What is the capital of Japan?", "What is 17 times 23?", "What is the capital of Germany?"):
        state = react.run(question, backend=runtime)
        print(state.text().removeprefix(EXAMPLES))
        print(f"=> {state.ret_value}\n")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
