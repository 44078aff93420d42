# ruff: noqa: E501
import json

import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.expressions import Expressions
from phloem.constrained.json.formats import FORMATS, format_language

from ..conftest import as_json, takes


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"), ("date", "2024-12-31", "2024-02-30"), ("time", "23:59:59Z", "24:00:00Z"),
        ("date-time", "2024-01-01T00:00:00+01:00", "2024-01-01"), ("email", "a.b@example.com", "a@"),
        ("ipv4", "192.168.0.1", "256.1.1.1"), ("ipv6", "::1", "1::2::3"), ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123"),
        ("uri", "https://example.com/a?b#c", "//no-scheme"), ("hostname", "a-b.example", "-a"), ("duration", "P1DT2H", "P"),
        ("json-pointer", "/a~0b/c", "a"), ("uri-reference", "../a", "a b"), ("uri-template", "/{a:3}{?b*,c}", "{a:0}"),
        ("idn-hostname", "bücher.example", "-ü"), ("idn-email", "ä@bücher.example", "ä@ü-"), ("iri", "http://ä/𐌀?\ue000", "http://ä/\ue000"),
    ],
)  # fmt: skip
def test_formats_are_enforced_unless_annotated(vocabulary: Vocabulary, name: str, good: str, bad: str) -> None:
    schema = json.dumps({"type": "string", "format": name})
    assert takes(compile("json_schema", schema, vocabulary), as_json(good))
    assert not takes(compile("json_schema", schema, vocabulary), as_json(bad))
    assert takes(compile("json_schema", schema, vocabulary, format="annotate"), as_json(bad))


TIMES = {"23:59:60Z", "01:29:60+01:30", "00:29:60-23:30", "15:59:60.5-08:00", "23:59:60-00:00", "05:44:60+05:45"}


def test_a_leap_second_is_at_the_end_of_a_day_in_utc() -> None:
    ex = Expressions()
    times = format_language("time", ex)
    assert all(ex.matches(times, time.encode()) for time in TIMES)
    for hour in range(24):
        for offset in ("Z", "+00:00", "-08:00", "+05:45", "+13:15"):
            sign, hours, minutes = (
                (1 - 2 * (offset[0] == "-"), int(offset[1:3] or 0), int(offset[4:] or 0))
                if offset != "Z"
                else (1, 0, 0)
            )
            for minute in (0, 13, 14, 29, 44, 59):
                in_utc = (hour * 60 + minute - sign * (hours * 60 + minutes)) % 1440
                time = f"{hour:02}:{minute:02}:60{offset}"
                assert ex.matches(times, time.encode()) == (in_utc == 1439), time
                assert ex.matches(times, time.replace(":60", ":59").encode())


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("uri-template", ["", "a%41b", "a😀b", "{+v}", "{#v}", "{v*}", "{x,y}", "{a.b}", "{%41}", "{v:1000}", "a'b", "/x{;p}"],
         ["{}", "{a,,b}", "{v:01}", "{v:10000}", "a}", "a%4", "{a..b}", "{%}", "a b", "a\x7f", "{a,}", "{v=d}", "{,+v}", "{", 'a"']),
        ("email", ['"a b"@c.d', '""@c', '"\\""@c', "a@[ipv6:::1]", "a@[1.2.3.4]"], ['"é"@c', '"\\é"@c', '"a"b@c', "a@[1.2.3]", "a@b@c"]),
        ("iri", ["http://ƒ.ß/𐌀#é", "http://ƒ/?\U000f0000", "urn:a:é"], ["http://ƒ/#\ue000", "é", "http://2001:db8::1", "a:\\"]),
        ("date-time", ["1998-12-31T23:59:60Z", "1985-04-12T00:59:59.999999999999999Z"], ["1998-12-31T22:59:60Z", "1998-12-31T23:59:61Z"]),
    ],
)  # fmt: skip
def test_details_of_the_standards_of_formats(name: str, good: list[str], bad: list[str]) -> None:
    ex = Expressions()
    language = format_language(name, ex)
    assert [text for text in good if not ex.matches(language, text.encode())] == []
    assert [text for text in bad if ex.matches(language, text.encode())] == []


def test_every_format_has_texts_and_refuses_others() -> None:
    samples = {
        "date": "2000-02-29", "time": "12:00:00.123Z", "date-time": "2024-01-01t00:00:00z", "duration": "P3W",
        "email": "a@b.c", "idn-email": "ä@ö.ü", "hostname": "a.b-c", "idn-hostname": "ä.b", "ipv4": "10.0.0.255",
        "ipv6": "fe80::1:2.3.4.5", "uri": "urn:a:b", "uri-reference": "a/b?c", "iri": "http://ä/ö", "iri-reference": "/ö",
        "uuid": "00000000-0000-0000-0000-00000000000F", "json-pointer": "", "relative-json-pointer": "2#", "uri-template": "{a}",
    }  # fmt: skip
    assert samples.keys() == FORMATS
    ex = Expressions()
    for name, text in samples.items():
        language = format_language(name, ex)
        assert ex.matches(language, text.encode()) and not ex.matches(language, b"\n \n"), name


def test_a_format_that_is_no_regular_language_is_an_annotation(vocabulary: Vocabulary) -> None:
    for name in ("regex", "of-my-own"):
        assert takes(compile("json_schema", json.dumps({"format": name}), vocabulary), '"("')
