"""The vocabulary of sharded training: roles, placements, groups, policies, parameter plans."""

from hyper_parallel.errors import (
    CaptureError,
    HPCompileError,
    MeshError,
    PlacementError,
    PolicyError,
    ReplicaError,
    ShardedStateError,
    UnusedParameterError,
    VerificationError,
)
from hyper_parallel.fully_shard import (
    HSDPCell,
    HSDPModule,
    HSDPParam,
    ShardedState,
    fully_shard,
    get_model_state_dict,
    hsdp,
    register_fsdp_forward_method,
    set_model_state_dict,
    share_comm_ctx,
)
from hyper_parallel.groups import GroupInfo, get_group_info
from hyper_parallel.mesh import (
    MeshLayout,
    MeshRoles,
    ParallelState,
    build_fsdp_meshes,
    infer_roles,
    validate_hybrid_shard_args,
)
from hyper_parallel.norm import clip_grad_norm_, get_total_norm
from hyper_parallel.plan import ParamPlan, plan_param, plan_params
from hyper_parallel.policy import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Policy,
)

__all__ = [
    "CPUOffloadPolicy",
    "CaptureError",
    "GroupInfo",
    "HPCompileError",
    "HSDPCell",
    "HSDPModule",
    "HSDPParam",
    "MeshError",
    "MeshLayout",
    "MeshRoles",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelState",
    "ParamPlan",
    "PlacementError",
    "Policy",
    "PolicyError",
    "ReplicaError",
    "ShardedState",
    "ShardedStateError",
    "UnusedParameterError",
    "VerificationError",
    "build_fsdp_meshes",
    "clip_grad_norm_",
    "fully_shard",
    "get_group_info",
    "get_model_state_dict",
    "get_total_norm",
    "hsdp",
    "infer_roles",
    "plan_param",
    "plan_params",
    "register_fsdp_forward_method",
    "set_model_state_dict",
    "share_comm_ctx",
    "validate_hybrid_shard_args",
]
