"""Compares masks with their definition: at every state of random walks through random grammars, every token is tried.

    python -m phloem.tests.constrained.oracle --walks 100000

A token is allowed if some text of the language begins with the text so far and the token's bytes. The reference parses
characters by Earley's algorithm at its plainest, on productions, and shares no code with the grammars it checks.
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass, field

import numpy as np
from phloem.constrained import GrammarError, Matcher, Vocabulary, compile

ALPHABET = "ab(,)"
WORDS = ("aa", "ab", "ba", "abb", "((", "))", "),", "a,", ",b", "a)", "(a", "b)", "aab", ",a,", "()", "aaaa", "b,(")
Item = tuple[int, int, int]  # production, dot, where it began


def small_vocabulary() -> Vocabulary:
    tokens = [c.encode() for c in ALPHABET] + [w.encode() for w in WORDS] + [b"</s>"]
    return Vocabulary(tokens, {len(tokens) - 1}, len(tokens) - 1)


@dataclass(slots=True)
class Reference:
    """Productions over characters: ``(rule, symbols)``, a symbol a rule's number or a set of characters."""

    productions: list[tuple[int, tuple[int | frozenset[str], ...]]] = field(default_factory=list)
    num_rules: int = 0
    charts: dict[str, list[set[Item]]] = field(default_factory=dict)
    by_rule: dict[int, list[int]] = field(default_factory=dict)

    def rule(self) -> int:
        self.num_rules += 1
        return self.num_rules - 1

    def chart(self, text: str) -> list[set[Item]] | None:
        """The sets after each character; None if no text of the language begins so."""
        found = self.charts.get(text)
        if found is None:
            if text:
                before = self.chart(text[:-1])
                if before is None:
                    return None
                scanned = set()
                for p, d, o in before[-1]:
                    symbols = self.productions[p][1]
                    if d < len(symbols):
                        symbol = symbols[d]
                        if isinstance(symbol, frozenset) and text[-1] in symbol:
                            scanned.add((p, d + 1, o))
                found = [*before, scanned]
            else:
                found = [{(p, 0, 0) for p, (rule, _) in enumerate(self.productions) if rule == 0}]
            self._close(found)
            self.charts[text] = found
        return found if found[-1] else None

    def _close(self, chart: list[set[Item]]) -> None:
        if not self.by_rule:
            for p, (rule, _) in enumerate(self.productions):
                self.by_rule.setdefault(rule, []).append(p)
        here = len(chart) - 1
        items = chart[-1]
        todo = list(items)
        empty: set[int] = set()  # rules that begin and end here
        while todo:
            p, d, o = todo.pop()
            rule, symbols = self.productions[p]
            new: list[Item] = []
            if d == len(symbols):
                if o == here:
                    empty.add(rule)
                new = [(q, e + 1, start) for q, e, start in chart[o] if self._next(q, e) == rule]
            elif isinstance(symbols[d], int):
                new = [(q, 0, here) for q in self.by_rule.get(symbols[d], ())]
                if symbols[d] in empty:
                    new.append((p, d + 1, o))
            for item in new:
                if item not in items:
                    items.add(item)
                    todo.append(item)

    def _next(self, production: int, dot: int) -> int | frozenset[str] | None:
        symbols = self.productions[production][1]
        return symbols[dot] if dot < len(symbols) else None

    def may_end(self, text: str) -> bool:
        chart = self.chart(text)
        return chart is not None and any(
            self.productions[p][0] == 0 and d == len(self.productions[p][1]) and o == 0 for p, d, o in chart[-1]
        )

    def is_productive(self) -> bool:
        """Whether every rule derives some text, so that what parses can be completed."""
        done: set[int] = set()
        while True:
            more = {r for r, symbols in self.productions if all(not isinstance(s, int) or s in done for s in symbols)}
            if more <= done:
                return len(done) == self.num_rules
            done |= more


def random_grammar(rng: random.Random) -> tuple[str, Reference]:
    """EBNF text and its productions."""
    names = ["root", *[f"r{i}" for i in range(rng.randrange(4))]]
    reference = Reference()
    for _ in names:
        reference.rule()

    def symbol() -> tuple[str, tuple[int | frozenset[str], ...]]:
        kind = rng.randrange(10)
        if kind < 3:
            word = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 3)))
            text, symbols = f'"{word}"', tuple(frozenset(c) for c in word)
        elif kind < 5:
            chars = rng.sample("ab,", 2)
            text, symbols = f"[{''.join(chars)}]", (frozenset(chars),)
        else:
            number = rng.randrange(len(names))
            text, symbols = names[number], (number,)
        repeat = rng.choice(["", "", "", "?", "*", "+"])
        if repeat:
            many = reference.rule()
            if repeat != "+":
                reference.productions.append((many, ()))
            if repeat != "*":
                reference.productions.append((many, symbols))
            if repeat != "?":
                reference.productions.append((many, (many, *symbols)))
            symbols = (many,)
        return text + repeat, symbols

    lines = []
    for number, name in enumerate(names):
        bodies = []
        for _ in range(rng.randrange(1, 4)):
            parts = [symbol() for _ in range(rng.randrange(0 if rng.random() < 0.2 else 1, 4))]
            reference.productions.append((number, tuple(s for _, symbols in parts for s in symbols)))
            bodies.append(" ".join(text for text, _ in parts) or '""')
        lines.append(f"{name} ::= " + " | ".join(bodies))
    return "\n".join(lines), reference


def check_state(matcher: Matcher, reference: Reference, text: str, grammar: str) -> list[int]:
    """Compare one state with the definition; the tokens that are allowed."""
    vocabulary = matcher.grammar.machine.vocabulary
    row = np.zeros(vocabulary.num_words, np.uint32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    expected = [
        t for t in range(len(vocabulary) - 1) if reference.chart(text + vocabulary.tokens[t].decode()) is not None
    ]
    found = [t for t in np.flatnonzero(bits).tolist() if t != vocabulary.eos]
    assert found == expected, f"after {text!r}: {set(found) ^ set(expected)} of\n{grammar}"
    assert bool(bits[vocabulary.eos]) == matcher.is_accepting() == reference.may_end(text), f"{text!r} of\n{grammar}"
    return expected


def check_walks(vocabulary: Vocabulary, *, grammars: int, walks: int, longest: int, seed: int) -> int:
    """Random walks through random grammars; the number of states compared. Each state is compared once."""
    rng = random.Random(seed)
    states = 0
    for _ in range(grammars):
        text, reference = random_grammar(rng)
        try:
            grammar = compile("ebnf", text, vocabulary)
        except GrammarError as error:
            assert "no text matches" in str(error), text
            continue
        if not reference.is_productive():
            continue
        known: dict[str, list[int]] = {}
        for _ in range(walks):
            matcher = grammar.matcher()
            so_far = ""
            while len(so_far) < longest:
                if so_far not in known:
                    known[so_far] = check_state(matcher, reference, so_far, text)
                if not known[so_far]:
                    break
                token = rng.choice(known[so_far])
                assert matcher.accept(token)
                so_far += vocabulary.tokens[token].decode()
        states += len(known)
    return states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", type=int, default=100_000, help="walks in all (default: 100000)")
    parser.add_argument("--per-grammar", type=int, default=100, help="walks through each grammar (default: 100)")
    parser.add_argument("--longest", type=int, default=10, help="a walk's bytes (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.monotonic()
    vocabulary, done, states = small_vocabulary(), 0, 0
    while done < args.walks:
        states += check_walks(
            vocabulary, grammars=10, walks=args.per_grammar, longest=args.longest, seed=args.seed + done
        )
        done += 10 * args.per_grammar
        sys.stdout.write(f"{done:,} walks, {states:,} states, {time.monotonic() - begin:.0f} s, no difference\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
