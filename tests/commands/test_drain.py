"""``phloem drain``: a replica of a running server is taken out of service."""

import pytest
from phloem import cli
from phloem.cluster.supervisor import Supervisor
from phloem.runtime.config import EngineConfig
from phloem.tests.runtime.server.conftest import serving
from phloem.tests.runtime.wire import wait_until


@pytest.mark.parametrize("flags", [[], ["--migrate"]])
def test_a_replica_is_drained_over_http_and_the_command_waits_for_its_end(capsys, flags):
    engines = "phloem.tests.runtime.process.engines:plain"
    with Supervisor(EngineConfig(model="none"), tokenize=lambda ops: [], factory=engines, replicas=2) as supervisor:
        wait_until(lambda: all(replica.state == "ready" for replica in supervisor.replicas()))
        with serving() as start:
            server = start(client=supervisor.fleet, supervisor=supervisor)
            assert cli.main(["drain", "1", server.url, *flags]) == 0
            assert capsys.readouterr().out.splitlines()[-1] == "replica 1: stopped"
            assert [one["state"] for one in server.http.get("/fleet").json()["replicas"]] == ["ready", "stopped"]
            assert server.http.get("/health").json()["replicas"] == {"ready": 1, "total": 2}
            assert server.openai.completions.create(model="string", prompt="a b").choices
            assert cli.main(["drain", "0", server.url, *flags]) != 0
            assert "no other one is ready" in capsys.readouterr().err
            answer = server.http.post("/fleet/drain/1?migrate=perhaps")
            assert answer.status_code in (400, 422) and "migrate" in answer.text
