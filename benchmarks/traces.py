"""Generated traces: the calls that programs of each kind make to a model, and when, by seed."""

import random
from collections.abc import Callable

from phloem.cluster.traces import Paths, Span, TimedCall, TimedProgram, Trace

LEAST_TURNS, MOST_TURNS, PAUSE_S = 2, 10, 10.0  # of a chat


def chat(n: int, rate: float, rng: random.Random) -> Trace:
    """Conversations of 2 to 10 turns below one of 4 system prompts; people think for about 10 s."""
    paths, programs = Paths(), []
    for i, program in enumerate(_arrivals("chat", n, rate, rng)):
        path = paths.add((), f"system {i % 4}", 400)
        last: tuple[TimedCall, ...] = ()
        for turn in range(rng.randint(LEAST_TURNS, MOST_TURNS)):
            path = paths.add(path, f"{i} turn {turn}", _length(rng, 60))
            call = program.call(
                paths, 0, path, _length(rng, 150), delay_s=rng.expovariate(1 / PAUSE_S) if turn else 0.0, after=last
            )
            path, last = call.output, (call,)
        programs.append(program)
    return Trace("chat", paths, programs)


def http_chat(n: int, rate: float, rng: random.Random) -> Trace:
    """The same conversations from clients that send the whole text every turn: each turn is a new program."""
    conversations = chat(n, rate, rng)
    programs = []
    for conversation in conversations.programs:
        for turn, call in enumerate(conversation.calls):
            call.program = TimedProgram(
                f"{conversation.name} {turn}", conversation.start_s, conversation.tenant, calls=[call]
            )
            programs.append(call.program)
    return Trace("http_chat", conversations.paths, programs)


def few_shot(n: int, rate: float, rng: random.Random) -> Trace:
    """Single questions below one of 40 sets of examples, drawn by Zipf's law."""
    paths, programs = Paths(), []
    weights = [1 / (k + 1) for k in range(40)]
    for i, program in enumerate(_arrivals("few_shot", n, rate, rng)):
        shots = rng.choices(range(40), weights)[0]
        path = paths.add(paths.add((), f"shots {shots}", 600 + 50 * shots), f"question {i}", _length(rng, 80))
        program.call(paths, 0, path, _length(rng, 40))
        programs.append(program)
    return Trace("few_shot", paths, programs)


def tree_of_thought(n: int, rate: float, rng: random.Random) -> Trace:
    """Three levels of 4 proposals, each judged by a call of its own; the best two go on."""
    paths, programs = Paths(), []
    for i, program in enumerate(_arrivals("tree", n, rate, rng)):
        root = paths.add(paths.add((), "instructions", 500), f"{i} task", _length(rng, 300))
        front: list[tuple[tuple[Span, ...], tuple[TimedCall, ...]]] = [(root, ())]
        line = 0
        for level in range(3):
            judged: list[tuple[tuple[Span, ...], TimedCall]] = []
            for path, after in front:
                for branch in range(4):
                    line += 1
                    ask = paths.add(path, f"{i} propose {level} {branch} {line}", 20)
                    thought = program.call(paths, line, ask, _length(rng, 120), after=after)
                    judge = paths.add(thought.output, f"{i} judge", 30)
                    judged.append((thought.output, program.call(paths, line, judge, 4, after=(thought,))))
            votes = tuple(call for _, call in judged)
            front = [(path, votes) for path, _ in rng.sample(judged, 2)]
        programs.append(program)
    return Trace("tree_of_thought", paths, programs)


def agents(n: int, rate: float, rng: random.Random) -> Trace:
    """Agents of 4 to 14 steps below one of 3 long tool descriptions. A tool takes 0.2 to 8 s; its answers are long."""
    paths, programs = Paths(), []
    for i, program in enumerate(_arrivals("agents", n, rate, rng)):
        path = paths.add(paths.add((), f"tools {i % 3}", 1500), f"{i} task", _length(rng, 100))
        last: tuple[TimedCall, ...] = ()
        for step in range(rng.randint(4, 14)):
            call = program.call(
                paths, 0, path, _length(rng, 60), delay_s=rng.uniform(0.2, 8.0) if step else 0.0, after=last
            )
            path, last = paths.add(call.output, f"{i} result {step}", _length(rng, 250)), (call,)
        programs.append(program)
    return Trace("agents", paths, programs)


def rag(n: int, rate: float, rng: random.Random) -> Trace:
    """Questions about 3 of 300 documents, drawn by Zipf's law, popular ones first, below one instruction."""
    paths, programs = Paths(), []
    weights = [1 / (k + 1) for k in range(300)]
    lengths = [_length(rng, 500) for _ in range(300)]
    for i, program in enumerate(_arrivals("rag", n, rate, rng)):
        path = paths.add((), "instruction", 100)
        for document in sorted({rng.choices(range(300), weights)[0] for _ in range(3)}):
            path = paths.add(path, f"document {document}", lengths[document])
        program.call(paths, 0, paths.add(path, f"question {i}", _length(rng, 40)), _length(rng, 100))
        programs.append(program)
    return Trace("rag", paths, programs)


def mixed(n: int, rate: float, rng: random.Random) -> Trace:
    """Single calls of three functions: half write titles, a third answers, a sixth reports of varying length."""
    paths, programs = Paths(), []
    for i, program in enumerate(_arrivals("mixed", n, rate, rng)):
        program.kind, mean = rng.choices((("title", 10), ("answer", 120), ("report", 900)), (3, 2, 1))[0]
        path = paths.add(paths.add((), program.kind, 200), f"{i} text", _length(rng, 150))
        program.call(paths, 0, path, _length(rng, mean))
        programs.append(program)
    return Trace("mixed", paths, programs)


TRACES: dict[str, tuple[Callable[[int, float, random.Random], Trace], int, float, tuple[int, int]]] = {
    # name: (generator, programs, programs per second, slots of the pool: roomy and tight)
    # A roomy pool holds the tokens of running programs and popular ones, but not those of ended programs.
    "chat": (chat, 1200, 4.0, (200_000, 120_000)),
    "http_chat": (http_chat, 1200, 4.0, (200_000, 120_000)),
    "few_shot": (few_shot, 3000, 60.0, (80_000, 40_000)),
    "tree_of_thought": (tree_of_thought, 150, 1.5, (30_000, 20_000)),
    "agents": (agents, 400, 3.0, (200_000, 120_000)),
    "rag": (rag, 2000, 15.0, (360_000, 60_000)),
}


def _arrivals(name: str, n: int, rate: float, rng: random.Random) -> list[TimedProgram]:
    at, made = 0.0, []
    for i in range(n):
        at += rng.expovariate(rate)
        # The first of four tenants sends half of the calls.
        made.append(TimedProgram(f"{name} {i}", at, f"tenant {rng.choices(range(4), (3, 1, 1, 1))[0]}"))
    return made


def _length(rng: random.Random, mean: int) -> int:
    return max(2, int(rng.gammavariate(2.0, mean / 2.0)))
