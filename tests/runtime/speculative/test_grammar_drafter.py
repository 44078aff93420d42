"""The token that is most frequent in a grammar state is drafted there, for all sequences of the namespace."""

import numpy as np
from phloem import constrained
from phloem.constrained import Vocabulary
from phloem.constrained.spec import GrammarSpec
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.speculative import GrammarDrafter, Price, Speculation, Want
from phloem.tests.runtime.engine.driver import Driver
from phloem.tests.runtime.speculative.oracle import Free

PRICE = Price(1.0, 0.01)
VOCABULARY = Vocabulary([bytes([i]) for i in range(128)] + [b""], {128}, 128)


def say(drafter: GrammarDrafter, matcher, text: str, *, seq_id: int = 1, namespace: str = "") -> list[str]:
    """Accept ``text`` token by token; returns the draft before each token."""
    guesses = []
    tokens = [1]
    for char in text:
        want = Want(seq_id, np.array(tokens, np.int32), False, 0, namespace, 6, frozenset(), matcher)
        found = drafter.propose(want, PRICE)
        guesses.append("" if found is None else bytes(found.draft.token_ids.tolist()).decode())
        assert matcher.accept(ord(char))
        tokens.append(ord(char))
        drafter.observe(seq_id, np.array([ord(char)], np.int32))
    return guesses


def test_the_most_frequent_value_is_drafted_where_the_grammar_allows_several():
    grammar = constrained.compile("regex", "(red|rust|green)[.!]", VOCABULARY)
    drafter = GrammarDrafter()
    for text in ("rust.", "rust.", "green!", "rust.", "rust."):
        say(drafter, grammar.matcher(), text)
    guesses = say(drafter, grammar.matcher(), "rust.")
    assert guesses[0].startswith("ru")
    assert all("rust."[i:].startswith(guess) for i, guess in enumerate(guesses))
    # In a state that does not allow the usual token nothing is drafted.
    assert say(drafter, grammar.matcher(), "red.")[2] == ""


def test_drafting_leaves_the_matcher_unchanged_and_namespaces_apart():
    grammar = constrained.compile("regex", "(ab|cd)+", VOCABULARY)
    drafter = GrammarDrafter()
    for _ in range(4):
        say(drafter, grammar.matcher(), "abab", namespace="a")
    matcher = grammar.matcher()
    found = drafter.propose(Want(5, np.array([1], np.int32), True, 0, "a", 6, frozenset(), matcher), PRICE)
    assert found is not None and matcher.num_tokens == 0
    assert drafter.propose(Want(6, np.array([1], np.int32), True, 0, "b", 6, frozenset(), matcher), PRICE) is None
    drafter.flush()
    assert drafter.propose(Want(7, np.array([1], np.int32), True, 0, "a", 6, frozenset(), matcher), PRICE) is None


def test_without_a_grammar_there_is_no_draft():
    want = Want(1, np.array([1], np.int32), True, 0, "", 6, frozenset())
    assert GrammarDrafter().propose(want, PRICE) is None


def test_in_an_engine_the_usual_answer_is_accepted_and_no_answer_changes(tiny_model_path):
    spec = GrammarSpec("regex", "(yes|yeah|no|never)[a-c]{1,3};")
    said = []
    for drafts in (False, True):
        engine = EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=1024))
        engine.loop.speculation = Speculation(
            [GrammarDrafter()] if drafts else [], max_draft=6, costs=Free(), clock=lambda: 0.0
        )
        texts = []
        for seed in range(12):
            params = SamplingParams(temperature=0.7, seed=seed, max_tokens=20)
            ops = [o.Text(op=0, seq=0, text=f"{seed}: "), o.Gen(op=1, seq=0, params=params, grammar=spec)]
            texts.append(Driver(engine, check=False).run(ops, program=f"p{seed}").value(1))
        said.append(texts)
        if drafts:
            assert engine.loop.speculation.accepted["grammar"] > 0
        engine.close()
    assert said[0] == said[1]
