"""The parts of Ray that ``cluster.ray`` uses. Run in a process of its own, as importing Ray changes the process."""

import inspect

import ray
from ray import serve
from ray.serve.context import ReplicaContext
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview, ServeStatus

PARAMETERS = {
    ray.init: "address num_cpus object_store_memory include_dashboard log_to_driver logging_level",
    serve.start: "proxy_location",
    serve.deployment: "name num_replicas ray_actor_options health_check_period_s graceful_shutdown_wait_loop_s "
    "graceful_shutdown_timeout_s max_constructor_retry_count",
    serve.RunTarget: "target name route_prefix",
    serve.run_many: "wait_for_ingress_deployment_creation wait_for_applications_running",
    serve.delete: "name",
    ServeStatus: "applications",
    ApplicationStatusOverview: "status message deployments",
    DeploymentStatusOverview: "status message",
    ReplicaContext: "replica_id",
    ray.util.get_node_ip_address: "",
    ray.shutdown: "",
    ray.is_initialized: "",
}


def missing() -> list[str]:
    """The parameters and fields that this version of Ray does not have."""
    return [
        f"{part.__name__}: {name}"
        for part, names in PARAMETERS.items()
        for name in names.split()
        if name not in inspect.signature(part).parameters
    ]
