"""Mooncake's trace format: which prompts share what, and which lines are refused."""

import json
from pathlib import Path

import phloem
import pytest
from phloem.cluster.traces import read_mooncake, tokens_of
from phloem.protocol.errors import InvalidRequest

SAMPLE = Path(phloem.__file__).parent / "benchmarks" / "data" / "mooncake_sample.jsonl"


def line(at_ms: int, num_in: int, num_out: int, ids: list[int]) -> str:
    return json.dumps({"timestamp": at_ms, "input_length": num_in, "output_length": num_out, "hash_ids": ids})


def test_equal_ids_are_equal_tokens_and_the_last_block_is_cut(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [(500, 1100, 7, [3, 4, 5]), (1500, 1024, 2, [3, 4]), (1600, 900, 1, [3, 9])]
    path.write_text("\n".join(line(*row) for row in lines))
    programs = read_mooncake(path).programs
    first, second, third = (tokens_of(program.calls[0].prompt).tolist() for program in programs)
    assert [len(first), len(second), len(third)] == [1100, 1024, 900]
    assert first[:1024] == second and first[:512] == third[:512] and not set(first[512:]) & set(third[512:])
    assert [program.start_s for program in programs] == [0.5, 1.5, 1.6]
    assert [program.calls[0].num_new for program in programs] == [7, 2, 1]
    twice = read_mooncake(path, copies=2).programs
    assert len(twice) == 6
    assert not set(tokens_of(twice[0].calls[0].prompt).tolist()) & set(tokens_of(twice[3].calls[0].prompt).tolist())


def test_our_sample_reads_and_shares_prefixes():
    trace = read_mooncake(SAMPLE)
    prompts = [call.prompt for program in trace.programs for call in program.calls]
    assert len(prompts) == 400
    seen, shared = set(), 0
    for prompt in prompts:
        shared += sum(span.length for span in prompt if span.index in seen)
        seen.update(span.index for span in prompt)
    assert 0.3 < shared / sum(span.length for prompt in prompts for span in prompt) < 0.9


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "line 2 is no line of a Mooncake trace: KeyError"),
        ("nonsense", "line 2 is no line of a Mooncake trace: JSONDecodeError"),
        (line(0, 600, 1, [1]), "line 2: 600 prompt tokens and 1 output tokens with 1 blocks of 512"),
        (line(0, 100, 0, [1]), "line 2: 100 prompt tokens and 0 output tokens"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path, text, told):
    path = tmp_path / "trace.jsonl"
    path.write_text(line(0, 100, 1, [1]) + "\n" + text)
    with pytest.raises(InvalidRequest, match=told):
        read_mooncake(path)
