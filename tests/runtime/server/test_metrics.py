"""The text for Prometheus: labels, histograms, and a bound on both; read back by Prometheus' own parser."""

from collections.abc import Mapping

import pytest
from phloem.cluster.supervisor import Replica
from phloem.protocol.messages import ProgramStats
from phloem.runtime.engine.usage import Usage
from phloem.runtime.server.metrics import ServerMetrics
from phloem.runtime.server.tenants import Keys
from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
FIRST: Labels = (("replica", "0"),)


def samples(engines: Mapping[str, object], **fleet: object) -> dict[tuple[str, Labels], float]:
    text = ServerMetrics(Keys({})).text(engines, **fleet).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_usage_has_labels_and_foreign_names_are_escaped():
    usage, name = Usage(), 'quo"te\nline\\'
    rows = usage.begin(tenant="garden", name=name)
    usage.end(rows, ProgramStats(prefilled_tokens=3, cached_tokens=9, preemptions=2, queue_s=0.5))
    found = samples({"0": {"usage": usage.report([])}})
    garden = (*FIRST, ("tenant", "garden"))
    assert found["phloem_engine_program_tokens_total", (("origin", "cached"), ("program", name), *FIRST)] == 9
    assert found["phloem_engine_tenant_tokens_total", (("origin", "computed"), *garden)] == 3
    assert found["phloem_engine_tenant_preemptions_total", garden] == 2
    assert found["phloem_engine_tenant_queue_seconds_total", garden] == 0.5
    assert found["phloem_engine_tenant_runs_total", garden] == 1
    assert found["phloem_engine_up", FIRST] == 1


def test_the_wait_is_a_cumulative_histogram():
    found = samples({"0": {"queue_seconds": {"bounds": (0.1, 1.0), "counts": [1, 2, 3], "total": 9.0}}})
    buckets = [found["phloem_engine_queue_seconds_bucket", (("le", le), *FIRST)] for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [1, 3, 6]
    assert found["phloem_engine_queue_seconds_count", FIRST] == 6
    assert found["phloem_engine_queue_seconds_sum", FIRST] == 9


def test_other_numbers_are_flat_and_what_is_no_number_is_left_out():
    found = samples({"0": {"slots": {"free": 3}, "cache_evicted_tokens": {"space": 5}, "name": "x"}})
    assert found["phloem_engine_slots_free", FIRST] == 3
    assert found["phloem_engine_cache_evicted_tokens_space", FIRST] == 5
    assert not any(name == "phloem_engine_name" for name, _ in found)


def test_a_lost_engine_leaves_the_servers_own_numbers():
    found = samples({"0": None})
    assert found["phloem_engine_up", FIRST] == 0 and ("phloem_http_prompt_tokens_total", ()) in found


@pytest.mark.parametrize("silent", [None, {"steps": 7}])
def test_each_replica_has_its_own_numbers_and_the_fleet_its_counters(silent):
    replicas = [Replica("0", "ready", 1, 11, 0, 0.0), Replica("1", "waiting", 4, 0, 3, 0.0)]
    fleet = {"placements": {"prefix": 5, "load": 2}, "replays": 4, "replicas": [{"rows": 9}]}
    found = samples({"0": {"steps": 3}, "1": silent}, replicas=replicas, fleet=fleet)
    second: Labels = (("replica", "1"),)
    assert found["phloem_engine_steps", FIRST] == 3 and found["phloem_engine_restarts_total", FIRST] == 0
    assert found["phloem_engine_up", second] == (silent is not None)
    assert found.get(("phloem_engine_steps", second)) == (None if silent is None else 7)
    assert found["phloem_engine_restarts_total", second] == 3
    assert found["phloem_fleet_placements_total", (("reason", "prefix"),)] == 5
    assert found["phloem_fleet_replays", ()] == 4
