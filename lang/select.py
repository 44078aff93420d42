"""The words ``select`` and ``distribution``: choosing one of several texts by its probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..protocol.errors import InvalidRequest
from .choices import ChoicesSamplingMethod, token_length_normalized
from .distribution import SglDistribution
from .expressions import SglArgument, SglExpr, SglSelect


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | None = None,
) -> SglExpr:
    """Append the likeliest of ``choices``; ``s[name]`` is that choice.

    ``temperature > 0`` draws one instead, with probabilities softmax(score / temperature) over the method's scores.
    """
    if not choices or isinstance(choices, str) or not all(_is_choice(c) for c in choices):
        raise InvalidRequest(f"select({name!r}, choices={choices!r}): must be a list of non-empty strings, one or more")
    method = choices_method or token_length_normalized
    if temperature:
        _check_draw(name, temperature, method)
    return SglSelect(name, tuple(choices), temperature, method)


def distribution(
    name: str,
    choices: Sequence[str],
    *,
    prior: Mapping[str, float] | None = None,
    temperature: float = 1.0,
) -> SglExpr:
    """The probability of each of ``choices`` at this place: ``s[name]`` is a ``Distribution``. Appends nothing.

    A choice's probability is that of its text. A choice that is a prefix of another one also gets that one's share, so
    end all choices alike (``" yes."``). ``prior``: probabilities to divide by, such as the ``Distribution`` of an input
    without content. ``temperature``: from ``fit_temperature``. See ``Distribution.calibrated``.
    """
    if not choices or isinstance(choices, str) or not all(_is_choice(c) for c in choices):
        raise InvalidRequest(f"distribution({name!r}, {choices!r}): must be a list of non-empty strings, one or more")
    texts = [choice for choice in choices if isinstance(choice, str)]
    if len(set(texts)) != len(texts):
        raise InvalidRequest(f"distribution({name!r}, {list(choices)!r}): a choice is given twice")
    if not isinstance(temperature, int | float) or not temperature > 0:
        raise InvalidRequest(f"distribution({name!r}, temperature={temperature!r}): must be above 0")
    if prior is not None and not isinstance(prior, Mapping):
        raise InvalidRequest(f"distribution({name!r}, prior={prior!r}): must map each choice to a probability")
    return SglDistribution(name, tuple(choices), prior, temperature)


def _check_draw(name: str | None, temperature: Any, method: ChoicesSamplingMethod) -> None:
    if not isinstance(temperature, int | float) or not 0.0 <= temperature <= 100.0:
        raise InvalidRequest(f"select({name!r}, temperature={temperature!r}): must be between 0 and 100")
    if method.wire_name is None or method.wire_name == "greedy_token_selection":
        raise InvalidRequest(
            f"select({name!r}, temperature={temperature}): {method!r} has no scores to draw by; leave temperature "
            "out, or use token_length_normalized or unconditional_likelihood_normalized"
        )


def _is_choice(choice: object) -> bool:
    return choice != "" if isinstance(choice, str) else isinstance(choice, SglArgument)
