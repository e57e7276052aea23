"""Policies: every field is checked where the policy is written, and a policy is a value."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
)

from hyper_parallel import policy as policy_module
from hyper_parallel.errors import PolicyError
from hyper_parallel.mesh import MeshRoles
from hyper_parallel.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Policy


class ParallelStyleOfMine(ParallelStyle):
    """A style that nobody but its author knows."""

    def _apply(self, module: nn.Module, device_mesh: object) -> nn.Module:
        return module


def shard_last(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def test_the_defaults() -> None:
    policy = Policy()
    assert policy.roles is None
    assert policy.enable_param_shard is None
    assert policy.reshard_after_forward is None
    assert policy.mp_policy == MixedPrecisionPolicy()
    assert policy.offload_policy == OffloadPolicy()
    assert policy.ignored_params == frozenset()
    assert policy.units == "auto"
    assert policy.bucket_mb is None
    assert policy.reduce_op == "avg"
    assert policy.fallback == "error"
    assert policy.backend == "inductor"
    assert policy.sync_weights is False
    assert policy.zero_level is None


def test_precision_and_offload_are_pytorch_s_own_classes() -> None:
    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        assert getattr(policy_module, name) is getattr(fsdp, name)


BAD_FIELDS = [
    (
        "roles",
        "dp",
        "a mapping from role to dim name(s), a MeshRoles, or None, got 'dp' of type str",
    ),
    ("enable_param_shard", 1, "True, False or None, got 1 of type int"),
    ("enable_param_shard", "yes", "True, False or None, got 'yes' of type str"),
    (
        "reshard_after_forward",
        0,
        "True, False, None, or the size (1 or more) of the group to reshard to, got 0 of type int",
    ),
    ("reshard_after_forward", -4, "True, False, None, or the size"),
    ("reshard_after_forward", 2.0, "True, False, None, or the size"),
    ("shard_placement_fn", Shard(0), "a function from a parameter to a Shard, or None, got"),
    ("mp_policy", torch.bfloat16, "a MixedPrecisionPolicy, got torch.bfloat16 of type dtype"),
    ("mp_policy", None, "a MixedPrecisionPolicy, got None of type NoneType"),
    ("offload_policy", "cpu", "OffloadPolicy() or CPUOffloadPolicy(), got 'cpu' of type str"),
    ("offload_policy", True, "OffloadPolicy() or CPUOffloadPolicy(), got True of type bool"),
    ("ignored_params", 3, "parameters or FQN globs, as a list or set, got 3 of type int"),
    ("ignored_params", [torch.zeros(2)], "parameters or FQN globs, as a list or set, got tensor("),
    ("ignored_params", nn.Parameter(torch.zeros(2)), "parameters or FQN globs, as a list or set"),
    ("ignored_params", {"a": 1}, "parameters or FQN globs, as a list or set"),
    ("min_shard_numel", -1, "a number of elements, 0 or more, got -1 of type int"),
    ("min_shard_numel", 1.5, "a number of elements, 0 or more, got 1.5 of type float"),
    ("min_shard_numel", True, "a number of elements, 0 or more, got True of type bool"),
    ("tp_plan", "all", "a mapping from module FQN globs to styles, 'auto' or None, got 'all'"),
    ("tp_plan", ["*.q_proj"], "a mapping from module FQN globs to styles, 'auto' or None, got ["),
    ("tp_plan", {1: "colwise"}, "FQN globs as keys, got 1 of type int"),
    ("tp_plan", {"": "colwise"}, "FQN globs as keys, got '' of type str"),
    ("ep_plan", 4, "a mapping from module FQN globs to styles, 'auto' or None, got 4"),
    ("units", 3, "'auto' or globs of module FQNs, got 3 of type int"),
    ("units", (), "'auto' or globs of module FQNs, got () of type tuple"),
    ("units", ("layers.*", 1), "'auto' or globs of module FQNs, got ('layers.*', 1)"),
    ("bucket_mb", -0.5, "None or a number of MB, 0 or more, got -0.5 of type float"),
    ("bucket_mb", float("nan"), "None or a number of MB, 0 or more, got nan of type float"),
    ("bucket_mb", "25", "None or a number of MB, 0 or more, got '25' of type str"),
    ("bucket_mb", True, "None or a number of MB, 0 or more, got True of type bool"),
    ("reduce_op", "mean", "'avg' or 'sum', got 'mean' of type str"),
    ("reduce_op", None, "'avg' or 'sum', got None of type NoneType"),
    ("sync_weights", None, "True or False, got None of type NoneType"),
    ("loss_parallel", 1, "True or False, got 1 of type int"),
    ("fallback", "warn", "'error' or 'eager', got 'warn' of type str"),
    ("backend", "eager", "'inductor' or 'aot_eager', got 'eager' of type str"),
    ("dynamic", "batch", "True, False or None, got 'batch' of type str"),
    ("zero_level", 4, "1, 2, 3 or None, got 4 of type int"),
    ("zero_level", True, "1, 2, 3 or None, got True of type bool"),
]


@pytest.mark.parametrize(("field", "value", "text"), BAD_FIELDS)
def test_wrong_values_name_the_field(field: str, value: object, text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(**{field: value})
    message = str(caught.value)
    assert text in message
    assert message.startswith((f"Policy.{field}: expected ", f"Policy.{field}["))
    assert isinstance(caught.value, ValueError)


def test_every_field_has_a_bad_value_in_the_table() -> None:
    assert {row[0] for row in BAD_FIELDS} == {spec.name for spec in dataclasses.fields(Policy)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("param_dtype", "bf16"),
        ("param_dtype", torch.int8),
        ("reduce_dtype", torch.bool),
        ("output_dtype", 32),
    ],
)
def test_precision_takes_floating_dtypes(field: str, value: object) -> None:
    with pytest.raises(
        PolicyError,
        match=rf"Policy.mp_policy.{field}: expected a floating-point torch.dtype or None, got",
    ):
        Policy(mp_policy=MixedPrecisionPolicy(**{field: value}))


def test_precision_checks_the_cast_flag() -> None:
    with pytest.raises(
        PolicyError, match=r"Policy.mp_policy.cast_forward_inputs: expected True or"
    ):
        Policy(mp_policy=MixedPrecisionPolicy(cast_forward_inputs=None))


def test_roles_are_checked() -> None:
    with pytest.raises(
        PolicyError,
        match=r"Policy.roles: unknown role 'pp'; the roles are replicate, shard, tp, ep, cp",
    ):
        Policy(roles={"pp": "stage"})
    with pytest.raises(
        PolicyError, match=r"Policy.roles: role 'tp': expected a mesh dim name or a tuple of names"
    ):
        Policy(roles={"tp": 1})


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ([], r"expected a style string such as 'colwise', or an object of .*, got list \[\]"),
        ("colwize", r"unknown style 'colwize'; did you mean 'colwise'\?"),
        ("mla_kv_a_proj", r"the style 'mla_kv_a_proj' is not supported"),
        (ParallelStyleOfMine(), r"the style ParallelStyleOfMine is not supported; use Colwise"),
        (
            PrepareModuleInput(
                input_layouts=(Shard(1), Shard(0)), desired_input_layouts=(Replicate(), Shard(1))
            ),
            r"PrepareModuleInput asks for different layouts of different inputs",
        ),
    ],
)
def test_styles_are_checked_when_the_policy_is_made(style: object, text: str) -> None:
    with pytest.raises(PolicyError, match=rf"Policy.tp_plan\['\*.up'\]: {text}"):
        Policy(tp_plan={"*.up": style})


def test_an_expert_style_must_be_hashable() -> None:
    with pytest.raises(
        PolicyError,
        match=r"Policy.ep_plan\['\*.up'\]: expected a style that can be hashed, got \[\]",
    ):
        Policy(ep_plan={"*.up": []})


@pytest.mark.parametrize(
    ("level", "changes", "text"),
    [
        (0, {}, "Policy.zero: the ZeRO levels are 1, 2 and 3, got 0"),
        (4, {}, "Policy.zero: the ZeRO levels are 1, 2 and 3, got 4"),
        ("3", {}, "Policy.zero: the ZeRO levels are 1, 2 and 3, got '3'"),
        (True, {}, "Policy.zero: the ZeRO levels are 1, 2 and 3, got True"),
        (
            1,
            {"reshard_after_forward": True},
            "Policy.reshard_after_forward: ZeRO-1 needs False, got True; build the policy with "
            "Policy.zero(1) or leave zero_level out",
        ),
        (
            2,
            {"reshard_after_forward": 4},
            "Policy.reshard_after_forward: ZeRO-2 needs False, got 4",
        ),
        (2, {"reshard_after_forward": None}, "Policy.reshard_after_forward: ZeRO-2 needs False"),
        (
            3,
            {"reshard_after_forward": False},
            "Policy.reshard_after_forward: ZeRO-3 needs True (or a group size), got False",
        ),
        (2, {"zero_level": 3}, "Policy.zero(2): zero_level=3 contradicts the level"),
    ],
)
def test_zero_levels_that_cannot_be(level: object, changes: dict, text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy.zero(level, **changes)
    assert str(caught.value).startswith(text)


def test_zero_levels() -> None:
    assert Policy.zero(1).reshard_after_forward is False
    assert Policy.zero(2).reshard_after_forward is False
    assert Policy.zero(3).reshard_after_forward is True
    assert Policy.zero(3, reshard_after_forward=4).reshard_after_forward == 4
    assert [Policy.zero(n, reduce_op="sum").zero_level for n in (1, 2, 3)] == [1, 2, 3]
    assert Policy.zero(1) != Policy.zero(2)
    # When gradients are reduced and parameters freed is the run's business, not the program's.
    assert Policy.zero(1).program_key() == Policy.zero(2).program_key()


def test_mappings_are_read_as_given_and_frozen() -> None:
    plan = {"*.up": ColwiseParallel(), "*.down": "rowwise"}
    policy = Policy(roles={"shard": ["dp", "cp"], "tp": "tp"}, tp_plan=plan, ep_plan="auto")
    plan["*.more"] = "colwise"
    assert policy.roles == {"shard": ("dp", "cp"), "tp": ("tp",)}
    assert policy.roles["shard"] == ("dp", "cp")
    assert "ep" not in policy.roles
    assert policy.roles.get("ep") is None
    assert policy.tp_plan["*.down"] == "rowwise"
    assert policy == dataclasses.replace(
        policy, tp_plan={"*.down": "rowwise", "*.up": ColwiseParallel()}
    )
    assert list(policy.tp_plan) == ["*.down", "*.up"]
    assert repr(policy.roles) == "{'shard': ('dp', 'cp'), 'tp': ('tp',)}"
    assert policy.ep_plan == "auto"
    with pytest.raises(KeyError):
        policy.tp_plan["*.more"]
    with pytest.raises(TypeError):
        policy.tp_plan["*.up"] = "rowwise"
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.units = "auto"


def test_a_policy_is_a_value() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    fields = {
        "roles": {"tp": "tp", "shard": ("dp", "cp")},
        "tp_plan": {"a": "colwise", "b": "rowwise"},
        "ignored_params": [weight, "*.inv_freq"],
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "shard_placement_fn": shard_last,
        "units": ["layers.*"],
    }
    one = Policy(**fields)
    two = Policy(
        **{
            **fields,
            "roles": {"shard": ("dp", "cp"), "tp": ("tp",)},
            "tp_plan": {"b": "rowwise", "a": "colwise"},
            "ignored_params": {"*.inv_freq", weight},
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        }
    )
    assert one == two
    assert hash(one) == hash(two)
    assert {one: "cached"}[two] == "cached"
    for field, value in {
        "ignored_params": [other, "*.inv_freq"],
        "offload_policy": OffloadPolicy(),
        "roles": MeshRoles(shard=("dp", "cp"), tp="tp"),
        "tp_plan": {"a": "colwise"},
        "dynamic": False,
        "units": "auto",
    }.items():
        assert dataclasses.replace(one, **{field: value}) != one


def test_a_policy_is_copied_and_pickled() -> None:
    policy = Policy(
        roles={"shard": "dp"}, tp_plan={"*.up": "colwise"}, ignored_params=["*.bias"], bucket_mb=25
    )
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy
    assert dataclasses.replace(policy) == policy
    with pytest.raises(PolicyError, match=r"Policy.bucket_mb"):
        dataclasses.replace(policy, bucket_mb=-1)


def test_texts_stand_for_one_pattern() -> None:
    policy = Policy(units="layers.*", ignored_params="*.bias")
    assert policy.units == ("layers.*",)
    assert policy.ignored_params == {"*.bias"}


CHANGES_THE_PROGRAM = {
    "reshard_after_forward": True,
    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "offload_policy": CPUOffloadPolicy(),
    "tp_plan": {"*.up": ColwiseParallel()},
    "ep_plan": "auto",
    "loss_parallel": True,
    "units": ("layers.*",),
    "bucket_mb": 0,
    "reduce_op": "sum",
    "dynamic": True,
}
LEAVES_THE_PROGRAM = {
    "roles": {"shard": "dp"},
    "enable_param_shard": True,
    "shard_placement_fn": shard_last,
    "ignored_params": ["*.bias"],
    "min_shard_numel": 10,
    "sync_weights": True,
    "fallback": "eager",
    "backend": "aot_eager",
    "zero_level": None,
}


def test_program_key_covers_every_field_that_changes_the_program() -> None:
    base = Policy().program_key()
    hash(base)
    for field, value in CHANGES_THE_PROGRAM.items():
        key = Policy(**{field: value}).program_key()
        changed = {name for (name, a), (_, b) in zip(base, key, strict=True) if a != b}
        assert changed == {field}
    for field, value in LEAVES_THE_PROGRAM.items():
        assert Policy(**{field: value}).program_key() == base
    assert CHANGES_THE_PROGRAM.keys() | LEAVES_THE_PROGRAM.keys() == {
        spec.name for spec in dataclasses.fields(Policy)
    }


def test_program_key_tells_styles_apart() -> None:
    keys = [
        Policy(tp_plan={"*": style}).program_key()
        for style in (
            "colwise",
            ColwiseParallel(),
            ColwiseParallel(output_layouts=Shard(1)),
            ColwiseParallel(use_local_output=False),
            PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        )
    ]
    assert len(set(keys)) == len(keys)
    same = Policy(tp_plan={"*": ColwiseParallel(output_layouts=Replicate())}).program_key()
    assert same == keys[1]  # an output is gathered where it is read whole, whatever the plan says


PRINT_KEY = """
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from hyper_parallel.policy import *
print(Policy(
    tp_plan={"*.up": ColwiseParallel(output_layouts=Replicate()), "*.down": "rowwise"},
    mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), bucket_mb=25.0,
    offload_policy=CPUOffloadPolicy(), units=["layers.*", "head"],
).program_key())
"""


def test_program_key_is_the_same_text_in_every_process() -> None:
    texts = {
        subprocess.run(
            [sys.executable, "-c", PRINT_KEY],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(texts) == 1
    assert " at 0x" not in texts.pop()
