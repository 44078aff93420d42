"""What a gen is given becomes typed parameters, or an error that names the parameter and its value."""

from typing import Any

import pytest
from phloem.lang.sampling_params import merge_sampling
from phloem.protocol.errors import InvalidParams, InvalidRequest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": "hot"}, "temperature='hot': expected `float`, got `str`"),
        ({"max_tokens": 2.5}, "max_tokens=2.5: expected `int`, got `float`"),
        ({"stop": ("a", 5)}, "stop=('a', 5): expected `str`, got `int`"),
        ({"stop": ("a",), "stop_token_ids": ("b",)}, "stop_token_ids=('b',): expected `int`, got `str`"),
        ({"logit_bias": {"five": 1}}, "logit_bias={'five': 1}: expected `int`, got `str`"),
        ({"ignore_eos": "yes"}, "ignore_eos='yes': expected `bool`, got `str`"),
        ({"seed": "a" * 1000}, "seed='aaa"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        merge_sampling({"max_tokens": 4}, given)
    assert str(caught.value).startswith(message) and len(str(caught.value)) < 300


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(InvalidRequest, match="unknown sampling parameter temprature"):
        merge_sampling({}, {"temprature": 1})


def test_numbers_and_keys_of_another_form_are_taken() -> None:
    params = merge_sampling({"temperature": 1}, {"logit_bias": {"5": 1}, "stop": ["a"]})
    assert (params.temperature, params.logit_bias, params.stop) == (1.0, {5: 1.0}, ("a",))
