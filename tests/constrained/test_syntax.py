from phloem.constrained.expressions import Expressions
from phloem.constrained.syntax import Alt, Anchor, Cat, Chars, Literal, Node, Rep, RuleName, language, leaves

DIGIT = Chars(((48, 57),))


def test_leaves_come_in_order_and_once_per_place() -> None:
    tree: Node = Cat((Literal("a"), Rep(Alt((DIGIT, RuleName("r", 1), Cat(()))), 0, None), Anchor("$"), Literal("a")))
    assert list(leaves(tree)) == [Literal("a"), DIGIT, RuleName("r", 1), Anchor("$"), Literal("a")]


def test_the_language_of_a_tree_asks_for_the_rules_it_names() -> None:
    ex = Expressions()
    tree = Cat((Literal("x"), Rep(Alt((DIGIT, RuleName("r", 1))), 1, 2)))
    expr = language(tree, ex, lambda name: ex.literal(f"<{name}>".encode()))
    texts = ("x", "x1", "x<r>", "x<r>7", "x123", "1")
    assert [ex.matches(expr, text.encode()) for text in texts] == [False, True, True, True, False, False]
