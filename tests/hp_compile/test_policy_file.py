"""Policies as TOML: every field, and errors that name file and key."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from hp_compile.policy_file import load_policy, parse_policy, policy_values
from hyper_parallel.errors import PolicyError
from hyper_parallel.mesh import MeshRoles
from hyper_parallel.policy import CPUOffloadPolicy, MixedPrecisionPolicy, Policy

EVERY_FIELD = """
enable_param_shard = true
reshard_after_forward = 4
shard_placement_fn = "tests.hp_compile.test_policy_file:on_dim_1"
ignored_params = ["*.inv_freq", "head.*"]
min_shard_numel = 64
tp_plan = "auto"
ep_plan = { "*.experts" = "rowwise" }
units = ["blocks.*"]
bucket_mb = 25.5
reduce_op = "sum"
sync_weights = true
loss_parallel = true
fallback = "eager"
backend = "aot_eager"
dynamic = false

[roles]
shard = ["dp_shard", "cp"]
tp = "tp"

[mp_policy]
param_dtype = "bf16"
reduce_dtype = "torch.float32"
cast_forward_inputs = false

[offload_policy]
kind = "cpu"
pin_memory = false
"""


def on_dim_1(param: nn.Parameter) -> Shard:
    return Shard(1)


def test_every_field() -> None:
    expected = Policy(
        roles={"shard": ("dp_shard", "cp"), "tp": "tp"},
        enable_param_shard=True,
        reshard_after_forward=4,
        shard_placement_fn=on_dim_1,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
        ignored_params=["*.inv_freq", "head.*"],
        min_shard_numel=64,
        tp_plan="auto",
        ep_plan={"*.experts": "rowwise"},
        units=("blocks.*",),
        bucket_mb=25.5,
        reduce_op="sum",
        sync_weights=True,
        loss_parallel=True,
        fallback="eager",
        backend="aot_eager",
        dynamic=False,
    )
    policy = parse_policy(EVERY_FIELD)
    assert policy == expected
    # and none is missing from the text above
    changed = {
        s.name for s in fields(Policy) if getattr(policy, s.name) != getattr(Policy(), s.name)
    }
    assert changed == {s.name for s in fields(Policy)} - {"zero_level"}


def test_empty_file_and_zero() -> None:
    assert parse_policy("") == Policy()
    assert parse_policy("zero = 2\nbucket_mb = 1") == Policy.zero(2, bucket_mb=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bucket = 25", "unknown key 'bucket'; did you mean 'bucket_mb'"),
        ("xyz = 1", "unknown key 'xyz'; the keys are backend, bucket_mb"),
        ("zero_level = 1", "unknown key 'zero_level'"),
        (
            '[mp_policy]\nparam_dtyp = "bf16"',
            "unknown key 'mp_policy.param_dtyp'; did you mean 'param",
        ),
        (
            '[mp_policy]\nparam_dtype = "bf17"',
            "mp_policy.param_dtype: expected the name of a dtype",
        ),
        ('[mp_policy]\nparam_dtype = "int8"', "mp_policy.param_dtype: expected a floating-point"),
        ('[mp_policy]\nparam_dtype = "nn"', "mp_policy.param_dtype: expected the name of a dtype"),
        ("[mp_policy]\ncast_forward_inputs = 1", "mp_policy.cast_forward_inputs: expected True or"),
        ('mp_policy = "bf16"', "mp_policy: expected a table ([mp_policy]), got 'bf16'"),
        ('bucket_mb = "25"', "Policy.bucket_mb: expected None or a number of MB"),
        ("units = 3", "Policy.units: expected 'auto' or globs"),
        ("ignored_params = [3]", "Policy.ignored_params: expected parameters or FQN globs"),
        ("[roles]\nshard = 3", "Policy.roles: "),
        ("[roles]\nshards = 'x'", "Policy.roles: unknown role 'shards'"),
        ("zero = 4", "the ZeRO levels are 1, 2 and 3"),
        ("zero = 3\nreshard_after_forward = false", "ZeRO-3 needs True"),
        ("[offload_policy]", "offload_policy.kind: expected 'none' or 'cpu', got None"),
        ('[offload_policy]\nkind = "cpu"\npin_memory = 1', "pin_memory: expected true or false"),
        ('[offload_policy]\nkind = "none"\npin_memory = true', "only kind 'cpu' has it"),
        ("shard_placement_fn = 1", "shard_placement_fn: expected 'package.module:function'"),
        ('shard_placement_fn = "tests.models:nope"', "cannot import 'tests.models:nope'"),
        ("bucket_mb = ", "no valid TOML: "),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(PolicyError) as raised:
        load_policy(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot read the policy"):
        load_policy(tmp_path / "none.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match="cannot read the policy"):
        load_policy(tmp_path / "binary")


def test_values_are_json_and_tell_policies_apart() -> None:
    policies = [
        Policy(),
        parse_policy(EVERY_FIELD),
        Policy(roles=MeshRoles(shard=("dp_shard",))),
        Policy(ignored_params=[nn.Parameter(torch.ones(1)), "a"]),
        Policy.zero(1),
        Policy(offload_policy=CPUOffloadPolicy()),
    ]
    texts = {json.dumps(policy_values(policy), sort_keys=True) for policy in policies}
    assert len(texts) == len(policies)
    values = policy_values(policies[1])
    assert values["shard_placement_fn"] == f"{__name__}:on_dim_1"
    assert values["ignored_params"] == ["*.inv_freq", "head.*"]
    assert policy_values(policies[3])["ignored_params"] == ["a", "(1 parameter objects)"]
