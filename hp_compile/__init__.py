"""Shard a model by passes over one captured graph: plan it, prove it, compile it, train it."""

from hp_compile.api import plan, shard, verify
from hp_compile.module import ShardedModule
from hp_compile.plan import Collective, Plan
from hp_compile.safetensors_io import load_safetensors, save_safetensors
from hyper_parallel.errors import (
    CaptureError,
    HPCompileError,
    MeshError,
    PlacementError,
    PolicyError,
    ReplicaError,
    VerificationError,
)
from hyper_parallel.norm import clip_grad_norm_, get_total_norm
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Policy

__all__ = [
    "CPUOffloadPolicy",
    "CaptureError",
    "Collective",
    "HPCompileError",
    "MeshError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParamPlan",
    "PlacementError",
    "Plan",
    "Policy",
    "PolicyError",
    "ReplicaError",
    "ShardedModule",
    "VerificationError",
    "clip_grad_norm_",
    "get_total_norm",
    "load_safetensors",
    "plan",
    "save_safetensors",
    "shard",
    "verify",
]
