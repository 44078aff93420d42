# ruff: noqa: E501
import json
import re

import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.json.formats import FORMATS

from ..conftest import as_json, takes


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"), ("date", "2024-12-31", "2024-02-30"), ("time", "23:59:59Z", "24:00:00Z"),
        ("date-time", "2024-01-01T00:00:00+01:00", "2024-01-01"), ("email", "a.b@example.com", "a@"),
        ("ipv4", "192.168.0.1", "256.1.1.1"), ("ipv6", "::1", "1::2::3"), ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123"),
        ("uri", "https://example.com/a?b#c", "//no-scheme"), ("hostname", "a-b.example", "-a"), ("duration", "P1DT2H", "P"),
        ("json-pointer", "/a~0b/c", "a"), ("uri-reference", "../a", "a b"),
    ],
)  # fmt: skip
def test_formats_are_enforced_unless_annotated(vocabulary: Vocabulary, name: str, good: str, bad: str) -> None:
    schema = json.dumps({"type": "string", "format": name})
    assert takes(compile("json_schema", schema, vocabulary), as_json(good))
    assert not takes(compile("json_schema", schema, vocabulary), as_json(bad))
    assert takes(compile("json_schema", schema, vocabulary, format="annotate"), as_json(bad))


def test_every_format_is_a_regex_of_its_own_texts() -> None:
    """Python's ``re`` reads the same patterns, but for date-time, which the standard lets begin with a small t."""
    samples = {
        "date": "2000-02-29", "time": "12:00:00.123Z", "date-time": "2024-01-01t00:00:00z", "duration": "P3W",
        "email": "a@b.c", "idn-email": "ä@ö.ü", "hostname": "a.b-c", "idn-hostname": "ä.b", "ipv4": "10.0.0.255",
        "ipv6": "fe80::1:2.3.4.5", "uri": "urn:a:b", "uri-reference": "a/b?c", "iri": "http://ä/ö", "iri-reference": "/ö",
        "uuid": "00000000-0000-0000-0000-00000000000F", "json-pointer": "", "relative-json-pointer": "2#",
    }  # fmt: skip
    assert samples.keys() == FORMATS.keys()
    for name, text in samples.items():
        assert re.fullmatch(FORMATS[name], text), name
        assert not re.fullmatch(FORMATS[name], "\n \n"), name


def test_a_format_that_is_no_regular_language_is_an_annotation(vocabulary: Vocabulary) -> None:
    for name in ("regex", "uri-template", "of-my-own"):
        assert takes(compile("json_schema", json.dumps({"format": name}), vocabulary), '"("')
