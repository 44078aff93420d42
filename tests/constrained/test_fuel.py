import pytest
from phloem.constrained import GrammarTooComplex
from phloem.constrained.fuel import Fuel


def test_a_question_may_spend_its_amount_and_no_more() -> None:
    fuel = Fuel()
    fuel.spend(1_000_000)  # without a limit
    with fuel.at_most(10):
        fuel.spend(10)
        with pytest.raises(GrammarTooComplex, match="takes more than 10 steps"):
            fuel.spend(1)
    fuel.spend(1_000_000)


def test_a_question_within_another_shares_what_is_left() -> None:
    fuel = Fuel()
    with fuel.at_most(10):
        fuel.spend(8)
        with fuel.at_most(100), pytest.raises(GrammarTooComplex, match="more than 10 steps"):
            fuel.spend(3)
    with fuel.at_most(100):
        with fuel.at_most(2), pytest.raises(GrammarTooComplex, match="more than 2 steps"):
            fuel.spend(3)
        fuel.spend(90)
