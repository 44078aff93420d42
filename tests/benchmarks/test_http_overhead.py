"""The comparison of HTTP with the engine's own client runs the same requests both ways."""

from phloem.benchmarks.http_overhead import measure_overhead, prompts


def test_both_ways_run_and_have_a_ratio(tiny_model_path, capsys):
    found = measure_overhead(str(tiny_model_path), rounds=1, streams=3, tokens=8)
    assert {name: len(values) for name, values in found["tokens_per_s"].items()} == {"engine": 1, "http": 1}
    assert found["ratio"] > 0 and "ratio" in capsys.readouterr().out


def test_no_round_finds_the_prompts_of_another_in_the_cache():
    first, second = prompts(0, 4), prompts(1, 4)
    assert len({*first, *second}) == 8
