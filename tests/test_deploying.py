"""The files of deploy/: they are well-formed, and every command and path in them exists."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import phloem
import pytest
import yaml
from fastapi.testclient import TestClient
from phloem import cli
from phloem.cluster.ray.options import read_options
from phloem.runtime.server.app import OPEN_PATHS, create_app
from phloem.tests.runtime.server.doubles import MODEL, ChatML, ScriptedClient, WordTokenizer

DEPLOY = Path(phloem.__file__).parent / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile*"))
INSTRUCTIONS = {
    *("FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
}


def instructions(file: Path) -> list[tuple[str, str]]:
    """A Dockerfile's instructions, each with its arguments on one line."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def is_served(path: str) -> bool:
    app = create_app(ScriptedClient(lambda submit: []), WordTokenizer(), ChatML(), model_name=MODEL)
    with TestClient(app) as http:
        is_open = OPEN_PATHS.fullmatch(path) is not None
        return is_open and http.get(path).status_code in (200, 503)  # 503: no engine answers here


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_builds_the_wheel_and_runs_a_command_that_exists(file):
    found = instructions(file)
    assert {name for name, _ in found} <= INSTRUCTIONS
    arguments = dict(found)
    assert any(name == "RUN" and "pip wheel" in rest for name, rest in found)
    assert arguments["USER"] != "root" and json.loads(arguments["ENTRYPOINT"]) == ["phloem"]
    args = cli.command_parser().parse_args(json.loads(arguments["CMD"]))
    assert (args.host, str(args.port)) == ("0.0.0.0", arguments["EXPOSE"])
    check = json.loads(arguments["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "healthcheck", "exec")
    path = re.search(r":8000(/\w+)", check[2])[1]
    assert is_served(path)
    stages = [name for name, rest in found if name == "FROM"]
    assert len(stages) == 2 and "from=build" in file.read_text()


def test_the_manifest_runs_a_command_and_probes_paths_that_exist():
    claim, deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    args = cli.command_parser().parse_args(container["args"])
    (port,) = container["ports"]
    assert args.port == port["containerPort"] and args.host == "0.0.0.0"
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert all(is_served(probe["path"]) for probe in probes)
    assert {probe["port"] for probe in probes} == {port["name"]} == {service["spec"]["ports"][0]["targetPort"]}
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"] == service["spec"]["selector"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert str(args.key_file).startswith(mounts["keys"])
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_manifest_for_kuberay_builds_an_application_that_its_nodes_can_run():
    (found,) = yaml.safe_load_all((DEPLOY / "rayservice.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")
    config, cluster = yaml.safe_load(found["spec"]["serveConfigV2"]), found["spec"]["rayClusterConfig"]
    (application,) = config["applications"]
    module, name = application["import_path"].split(":")
    source = (DEPLOY.parent / Path(*module.split(".")[1:])).with_suffix(".py").read_text()
    assert module.startswith("phloem.") and f"def {name}(args: dict[str, Any])" in source
    options = read_options(application["args"])
    assert options.key_file, "it is reached from other machines"

    (workers,) = cluster["workerGroupSpecs"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        assert options.key_file.startswith(mounts["keys"])
        assert {"name": "PHLOEM_HOME", "value": mounts["models"]} in container["env"]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1, "Ray wants the same versions everywhere"
    ports = {port["name"]: port["containerPort"] for port in pods[0]["containers"][0]["ports"]}
    assert ports["serve"] == config["http_options"]["port"]
    cpus = int(pods[1]["containers"][0]["resources"]["requests"]["cpu"])
    assert options.replica_config().num_threads <= cpus
    assert cpus // options.replica_config().num_threads * workers["maxReplicas"] >= 8, "room for max_replicas"


def test_the_systemd_unit_runs_a_command_that_exists(tmp_path):
    unit = (DEPLOY / "phloem.service").read_text()
    program, *args = shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1])
    assert program == "/opt/phloem/bin/phloem"
    assert (
        cli.command_parser().parse_args(args).key_file == Path("%d/keys.toml") and "LoadCredential=keys.toml:" in unit
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path):
    unit = (DEPLOY / "phloem.service").read_text().replace("/opt/phloem/bin/phloem", sys.executable)
    (tmp_path / "phloem.service").write_text(unit)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "phloem.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "phloem.service" in line]) == (0, [])
