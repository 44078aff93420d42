"""The text for Prometheus: labels, histograms, and a bound on both; read back by Prometheus' own parser."""

from phloem.protocol.messages import ProgramStats
from phloem.runtime.engine.usage import Usage
from phloem.runtime.server.metrics import ServerMetrics
from prometheus_client.parser import text_string_to_metric_families


def samples(engine: object) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = ServerMetrics().text(engine).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_usage_has_labels_and_foreign_names_are_escaped():
    usage, name = Usage(), 'quo"te\nline\\'
    rows = usage.begin(tenant="garden", name=name)
    usage.end(rows, ProgramStats(prefilled_tokens=3, cached_tokens=9, preemptions=2, queue_s=0.5))
    found = samples({"up": 1, "usage": usage.report([])})
    assert found["phloem_engine_program_tokens_total", (("origin", "cached"), ("program", name))] == 9
    assert found["phloem_engine_tenant_tokens_total", (("origin", "computed"), ("tenant", "garden"))] == 3
    assert found["phloem_engine_tenant_preemptions_total", (("tenant", "garden"),)] == 2
    assert found["phloem_engine_tenant_queue_seconds_total", (("tenant", "garden"),)] == 0.5
    assert found["phloem_engine_tenant_runs_total", (("tenant", "garden"),)] == 1
    assert found["phloem_engine_up", ()] == 1


def test_the_wait_is_a_cumulative_histogram():
    found = samples({"queue_seconds": {"bounds": (0.1, 1.0), "counts": [1, 2, 3], "total": 9.0}})
    assert [found["phloem_engine_queue_seconds_bucket", (("le", le),)] for le in ("0.1", "1.0", "+Inf")] == [1, 3, 6]
    assert found["phloem_engine_queue_seconds_count", ()] == 6 and found["phloem_engine_queue_seconds_sum", ()] == 9


def test_other_numbers_are_flat_and_what_is_no_number_is_left_out():
    found = samples({"slots": {"free": 3}, "cache_evicted_tokens": {"space": 5}, "name": "x"})
    assert found["phloem_engine_slots_free", ()] == 3 and found["phloem_engine_cache_evicted_tokens_space", ()] == 5
    assert not any(name == "phloem_engine_name" for name, _ in found)


def test_a_lost_engine_leaves_the_servers_own_numbers():
    assert ("phloem_http_prompt_tokens_total", ()) in samples(None)
