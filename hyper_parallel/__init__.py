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
from hyper_parallel.mesh import MeshLayout, MeshRoles, infer_roles
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
    "ParamPlan",
    "PlacementError",
    "Policy",
    "PolicyError",
    "VerificationError",
    "clip_grad_norm_",
    "get_group_info",
    "get_total_norm",
    "infer_roles",
    "plan_param",
    "plan_params",
]
