import itertools
import random

import pytest
from phloem.constrained import GrammarTooComplex
from phloem.constrained.fuel import Fuel
from phloem.constrained.json.formulas import FALSE, TRUE, Formulas

NAMES = "abcd"


@pytest.fixture
def formulas() -> Formulas:
    return Formulas(fuel=Fuel())


def holds(formulas: Formulas, formula: int, true: frozenset[str]) -> bool:
    """The formula's truth where just the leaves in ``true`` hold."""
    node = formulas.nodes[formula]
    match node[0]:
        case "leaf":
            return node[1][0] in true
        case "not":
            return not holds(formulas, node[1], true)
        case "and":
            return all(holds(formulas, part, true) for part in node[1:])
    return any(holds(formulas, part, true) for part in node[1:])


def random_formula(formulas: Formulas, rng: random.Random, depth: int) -> int:
    if depth == 0 or rng.random() < 0.2:
        return formulas.leaf(rng.choice(NAMES))
    parts = [random_formula(formulas, rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    match rng.randrange(4):
        case 0:
            return formulas.conjunction(parts)
        case 1:
            return formulas.disjunction(parts)
        case 2:
            return formulas.exactly_one(parts)
    return formulas.negation(parts[0])


TRUTHS = [frozenset(c) for n in range(5) for c in itertools.combinations(NAMES, n)]


@pytest.mark.parametrize("seed", range(40))
def test_formulas_mean_what_their_truth_tables_say(formulas: Formulas, seed: int) -> None:
    rng = random.Random(seed)
    left, right = random_formula(formulas, rng, 3), random_formula(formulas, rng, 3)
    conjunction, disjunction = formulas.conjunction([left, right]), formulas.disjunction([left, right])
    negation, one = formulas.negation(left), formulas.exactly_one([left, right])
    clauses = formulas.clauses(left)
    swapped = formulas.replace(left, lambda leaf: formulas.negation(formulas.leaf(*leaf)))
    for true in TRUTHS:
        a, b = holds(formulas, left, true), holds(formulas, right, true)
        assert holds(formulas, conjunction, true) == (a and b)
        assert holds(formulas, disjunction, true) == (a or b)
        assert holds(formulas, negation, true) == (not a)
        assert holds(formulas, one, true) == (a != b)
        assert any(all(holds(formulas, p, true) == sign for p, sign in clause) for clause in clauses) == a
        assert holds(formulas, swapped, frozenset(NAMES) - true) == a
        assert formulas.some_clause(left, lambda c, t=true: all(holds(formulas, p, t) == s for p, s in c)) == a
    assert formulas.negation(negation) == left


def test_equal_formulas_are_one(formulas: Formulas) -> None:
    a, b = formulas.leaf("a"), formulas.leaf("b")
    assert formulas.conjunction([a, b, a]) == formulas.conjunction([formulas.conjunction([b, a]), TRUE])
    assert formulas.conjunction([a, formulas.disjunction([a, b])]) == a
    assert formulas.conjunction([a, formulas.negation(a)]) == FALSE
    assert formulas.disjunction([a, formulas.negation(a)]) == TRUE


def test_leaves_and_their_signs(formulas: Formulas) -> None:
    a, b = formulas.leaf("a"), formulas.leaf("b")
    formula = formulas.conjunction([a, formulas.disjunction([b, formulas.negation(a)])])
    assert dict(formulas.leaves(formula)) == {a: ("a",), b: ("b",)}
    assert set(formulas.polarities(formula)) == {(a, True), (a, False), (b, True)}
    assert formulas.positive_clause(formula) is None
    assert formulas.positive_clause(formulas.conjunction([a, b])) == tuple(sorted((a, b)))


def test_limits_are_named(formulas: Formulas) -> None:
    pairs = [formulas.disjunction([formulas.leaf("x", i), formulas.leaf("y", i)]) for i in range(10)]
    with pytest.raises(GrammarTooComplex, match="more than 512 cases"):
        formulas.clauses(formulas.conjunction(pairs))
    with pytest.raises(GrammarTooComplex, match="65 branches that overlap .the limit is 64."):
        formulas.exactly_one([formulas.leaf("z", i) for i in range(65)])
    small = Formulas(fuel=Fuel(), max_formulas=3)
    small.leaf("a")
    assert small.is_half_full
    with pytest.raises(GrammarTooComplex, match="more than 3 formulas"):
        small.leaf("b")


def test_a_disjunction_of_many_choices_is_searched_one_alternative_after_the_other(formulas: Formulas) -> None:
    """Each alternative has 2 to the power of 40 clauses, all but the last one fail."""

    def choices(name: str) -> list[int]:
        return [formulas.disjunction([formulas.leaf(name, i), formulas.leaf(name, -i)]) for i in range(1, 41)]

    wrong = [formulas.conjunction([*choices(name), formulas.leaf(name, "no")]) for name in "abc"]
    asked = []

    def are_fine(clause) -> bool:
        asked.append(clause)
        return not any(formulas.nodes[leaf][1][-1] == "no" for leaf, _ in clause)

    assert not formulas.some_clause(formulas.disjunction(wrong), are_fine)
    assert formulas.some_clause(formulas.disjunction([*wrong, formulas.conjunction(choices("d"))]), are_fine)
    assert len(asked) < 1000


def test_a_conjunction_without_a_leaf_is_that_of_the_others(formulas: Formulas) -> None:
    leaves = [formulas.leaf(name) for name in NAMES]
    for count in range(1, len(leaves) + 1):
        for chosen in itertools.combinations(leaves, count):
            for left_out in leaves:
                others = formulas.conjunction([leaf for leaf in chosen if leaf != left_out])
                assert formulas.without(formulas.conjunction(chosen), left_out) == others
