"""The vocabulary of sharded training: roles, placements, groups, policies, parameter plans."""

from hyper_parallel.errors import (
    CaptureError,
    HPCompileError,
    MeshError,
    PlacementError,
    PolicyError,
    VerificationError,
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
    "VerificationError",
    "build_fsdp_meshes",
    "clip_grad_norm_",
    "get_group_info",
    "get_total_norm",
    "infer_roles",
    "plan_param",
    "plan_params",
    "validate_hybrid_shard_args",
]
