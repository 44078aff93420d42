"""The parts of Ray that ``cluster.ray`` uses. Run in a process of its own, as importing Ray changes the process."""

import inspect

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.context import ReplicaContext
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview, LoggingConfig, ServeStatus
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PARAMETERS = {
    ray.init: "address num_cpus object_store_memory include_dashboard log_to_driver logging_level",
    serve.start: "proxy_location http_options",
    serve.deployment: "name num_replicas ray_actor_options health_check_period_s graceful_shutdown_wait_loop_s "
    "graceful_shutdown_timeout_s max_constructor_retry_count max_ongoing_requests logging_config "
    "request_router_config autoscaling_config placement_group_bundles placement_group_strategy",
    serve.ingress: "app",
    serve.get_deployment_handle: "deployment_name app_name _check_exists",
    serve.RunTarget: "target name route_prefix",
    serve.run_many: "wait_for_ingress_deployment_creation wait_for_applications_running",
    serve.run: "target name route_prefix",
    serve.delete: "name",
    ServeStatus: "applications",
    ApplicationStatusOverview: "status message deployments",
    DeploymentStatusOverview: "status message",
    ReplicaContext: "replica_id",
    LoggingConfig: "enable_access_log",
    RequestRouterConfig: "request_router_class",
    AutoscalingConfig: "min_replicas initial_replicas max_replicas metrics_interval_s upscale_delay_s "
    "downscale_delay_s policy",
    AutoscalingPolicy: "policy_function policy_kwargs",
    AutoscalingContext: "raw_metrics current_num_replicas target_num_replicas",
    RequestRouter.choose_replicas: "candidate_replicas pending_request",
    RequestRouter.update_replicas: "replicas",
    RequestRouter.initialize_state: "kwargs",
    PendingRequest: "args",
    ray.util.get_node_ip_address: "",
    ray.util.get_current_placement_group: "",
    PlacementGroupSchedulingStrategy: "placement_group placement_group_bundle_index",
    ray.remote: "",
    ray.kill: "actor",
    ray.shutdown: "",
    ray.is_initialized: "",
}
MEMBERS = {
    RequestRouter: "curr_replicas",
    RunningReplica: "replica_id replica_metadata",
    DeploymentHandle: "remote",
    DeploymentResponse: "cancel",
}


def missing() -> list[str]:
    """The parameters, fields and members that this version of Ray does not have."""
    parameters = [
        f"{part.__name__}: {name}"
        for part, names in PARAMETERS.items()
        for name in names.split()
        if name not in inspect.signature(part).parameters and name not in getattr(part, "model_fields", {})
    ]
    members = [
        f"{kind.__name__}.{name}"
        for kind, names in MEMBERS.items()
        for name in names.split()
        if not hasattr(kind, name)
    ]
    return parameters + [f"{kind.__name__}.{name}" for kind, name in members if not hasattr(kind, name)]
