"""The table of sampling parameters: every place that takes them is made from it, and the docs show it."""

import inspect
import math
from pathlib import Path

import jsonschema
import phloem
import pytest
from phloem.lang.sampling_params import SAMPLING_NAMES, SglSamplingParams
from phloem.protocol.sampling import FIELDS, SamplingParams
from phloem.runtime.server.schemas import ChatRequest, CompletionRequest, GenerateRequest, NativeSampling

PARAMS = [field for field in FIELDS if field.part == "params"]
GENS = [field for field in FIELDS if field.part != "grammar"]


@pytest.mark.parametrize("field", GENS, ids=lambda field: field.name)
def test_a_row_is_a_parameter_wherever_one_is_taken(field):
    assert field.name in inspect.signature(phloem.gen).parameters
    assert {field.name, field.native or field.name} <= SAMPLING_NAMES  # run(), run_batch() and s.sampling()
    if field.part == "params":
        assert field.name in SamplingParams.__struct_fields__
    if field.native is not None:
        assert hasattr(SglSamplingParams(), field.native)
        assert field.native in (GenerateRequest if field.is_beside else NativeSampling).model_fields
    for model, name in ((ChatRequest, field.chat), (CompletionRequest, field.completions)):
        assert name is None or name in model.model_fields
        assert not field.extension or field.name in model.model_fields


def test_no_place_takes_a_sampling_parameter_that_has_no_row():
    assert [field.name for field in PARAMS] == list(SamplingParams.__struct_fields__)
    assert {field.native for field in FIELDS if field.native} | {"dtype"} == set(SglSamplingParams().__dict__)
    assert {name for field in GENS for name in (field.name, field.native or field.name)} == SAMPLING_NAMES


@pytest.mark.parametrize("field", PARAMS, ids=lambda field: field.name)
def test_defaults_have_no_faults_and_what_breaks_a_bound_is_named(field):
    assert field.holds(field.default) and not SamplingParams().faults()
    wrong = {
        "int": -7,
        "float": -3.0,
        "int | None": 2**63,
        "tuple[str, ...]": ("",),
        "typing.Literal['closed', 'cut']": "at once",
        "dict[int, float]": {1: math.nan},
    }
    kind = field.type.__name__ if isinstance(field.type, type) and "[" not in str(field.type) else str(field.type)
    if field.must_be:
        (fault,) = SamplingParams(**{field.name: wrong[kind]}).faults()[:1]
        assert fault == f"{field.name}={wrong[kind]!r}: must be {field.must_be}"


NUMBERS = [-(2**63) - 1, -(2**63), -3, -2.5, -2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 2.5, 10, 11, 100, 101, 2**63 - 1, 2**63]
BOUNDED = [
    field for field in FIELDS if field.part == "params" and field.must_be and field.type in (int, float, int | None)
]


@pytest.mark.parametrize("field", BOUNDED, ids=lambda field: field.name)
def test_the_limits_of_a_number_are_those_that_are_checked(field):
    values = [value for value in NUMBERS if field.type is float or isinstance(value, int)]
    schema = {"type": "number", **field.limits}
    assert field.limits and [jsonschema.Draft202012Validator(schema).is_valid(value) for value in values] == [
        field.holds(value) for value in values
    ]


def test_a_parameter_without_the_flag_that_it_needs_is_a_fault():
    assert SamplingParams(top_logprobs_num=2).faults() == ["top_logprobs_num=2: needs return_logprob=True"]
    assert not SamplingParams(top_logprobs_num=2, return_logprob=True).faults()


def as_markdown() -> str:
    """The table of docs/api.md."""
    lines = [
        "| parameter | default | what | must be | `/generate` | OpenAI chat | completions | Anthropic | LiteLLM |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for field in FIELDS:
        names = (field.native, field.chat, field.completions, field.anthropic, field.litellm)
        cells = [f"`{name}`" if name else "" for name in names]
        default = "" if field.part == "grammar" else f"`{field.default}`"
        lines.append(f"| `{field.name}` | {default} | {field.meaning} | {field.must_be} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_docs_show_the_table():
    page = (Path(phloem.__file__).parent / "docs" / "api.md").read_text()
    assert as_markdown() in page, f"write this into docs/api.md:\n{as_markdown()}"
