"""The public names of PyTorch's FSDPModule: each is here, with its arguments, or has a reason not to be."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import hyper_parallel
from hyper_parallel import HSDPModule, PolicyError, fully_shard, share_comm_ctx
from hyper_parallel.fully_shard.context import RunContext
from hyper_parallel.fully_shard.gather import AllGather
from hyper_parallel.fully_shard.reduce import ReduceScatter
from tests.baselines import TrainOptions
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, shard
from tests.fully_shard.test_setters import compare_mean
from tests.models import CASES

eager = importlib.import_module("hyper_parallel.fully_shard")  # the name is also a function's
LM = CASES["lm"]

# Methods that are not offered; docs/parity.md says the same.
METHODS_NOT_OFFERED = {
    "set_allocate_memory_from_process_group_for_comm": "only NCCL has an allocator of its own",
    "set_symm_mem_for_comm": "symmetric memory exists on NCCL only",
}
# Functions and classes of torch.distributed.fsdp that belong to fully_shard and are not offered.
NAMES_NOT_OFFERED = {
    "DataParallelMeshDims": "names of mesh dims, or roles, say it",
    "FSDPModule": "it is HSDPModule",
}
ARGUMENTS_NOT_OFFERED = {"fully_shard": {"dp_mesh_dims"}, "set_symm_mem_for_comm": {"backend"}}


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def test_every_method_is_offered_or_has_a_reason() -> None:
    assert public(fsdp.FSDPModule) - public(HSDPModule) == METHODS_NOT_OFFERED.keys()


def test_every_name_is_offered_or_has_a_reason() -> None:
    """What torch.distributed.fsdp exports and does not come from the older FSDP."""
    modern = importlib.import_module("torch.distributed.fsdp._fully_shard")
    theirs = set(fsdp.__all__) & set(modern.__all__)
    assert {"fully_shard", "share_comm_ctx", "UnshardHandle"} <= theirs
    ours = {*hyper_parallel.__all__, *eager.__all__}
    assert theirs - ours == NAMES_NOT_OFFERED.keys()


def callables() -> list[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    methods = [
        (name, getattr(fsdp.FSDPModule, name), getattr(HSDPModule, name))
        for name in sorted(public(fsdp.FSDPModule) & public(HSDPModule))
    ]
    functions = [
        (name, getattr(fsdp, name), getattr(eager, name))
        for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
    ]
    return methods + functions


@pytest.mark.parametrize(
    ("name", "theirs", "ours"), callables(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_arguments_are_those_of_torch(
    name: str, theirs: Callable[..., Any], ours: Callable[..., Any]
) -> None:
    """Names, order and which are optional: a call written for FSDP2 means the same here."""
    expected = {
        key: value
        for key, value in inspect.signature(theirs).parameters.items()
        if key not in ARGUMENTS_NOT_OFFERED.get(name, ())
    }
    actual = inspect.signature(ours).parameters
    by_place = [
        [key for key, value in found.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
        for found in (expected, actual)
    ]
    assert by_place[1][: len(by_place[0])] == by_place[0]
    assert expected.keys() <= actual.keys()
    for key, value in actual.items():
        if key not in expected or expected[key].default is not value.empty:
            assert value.default is not value.empty, key


def run_setter(rank: int, world_size: int, shape: tuple[int, ...], setter: str, value: Any) -> None:
    plain, model = LM.make(), LM.make()
    sharded = shard(model, LM, TrainOptions(mesh_shape=shape))
    getattr(sharded, setter)(value)
    for index in range(2):
        for module in (plain, model):
            inputs, targets = LM.batch(rank, index)
            LM.loss(module(inputs), targets).backward()
        compare_mean(model, plain)


@pytest.mark.dist
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("buffers", [1, 2, 9])
def test_gradients_with_several_reductions_in_flight(shape: tuple[int, ...], buffers: int) -> None:
    run_ranks(run_setter, 4, shape, "set_reduce_scatter_max_input_buffers", buffers)


def in_flight(rank: int, world_size: int, buffers: int) -> int:
    model = LM.make()
    sharded = shard(model, LM, TrainOptions())
    model.blocks[0].set_reduce_scatter_max_input_buffers(buffers)
    most = 0
    context = sharded._hsdp_unit_state
    inputs, targets = LM.batch(rank, 0)
    loss = LM.loss(model(inputs), targets)
    shared: RunContext = context.context
    add = shared.add_reduction

    def counted(reduction: Any) -> None:
        nonlocal most
        add(reduction)
        most = max(most, len(shared._reductions))

    shared.add_reduction = counted  # type: ignore[method-assign]
    loss.backward()
    assert not shared._reductions
    return most


@pytest.mark.dist
def test_how_many_reductions_are_in_flight() -> None:
    for buffers in (1, 2, 3):
        assert run_ranks(in_flight, 2, buffers) == [buffers] * 2


def separate(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    plain, model = LM.make(), LM.make()
    sharded = shard(model, LM, TrainOptions(mesh_shape=shape, reshard_after_forward=True))
    groups: dict[str, set[Any]] = {"gather": set(), "scatter": set()}

    class Gather(AllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            groups["gather"].add(args[2])
            return super().__call__(*args, **kwargs)

    class Scatter(ReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            groups["scatter"].add(args[2])
            return super().__call__(*args, **kwargs)

    for module in model.modules():
        if isinstance(module, HSDPModule):
            module.set_custom_all_gather(Gather())
            module.set_custom_reduce_scatter(Scatter())
    for enable in (True, False, True):
        sharded.set_separate_reduce_scatter_group(enable)
        for found in groups.values():
            found.clear()
        for module in (plain, model):
            module.zero_grad()
            inputs, targets = LM.batch(rank, 0)
            with count_collectives() as calls:
                LM.loss(module(inputs), targets).backward()
        compare_mean(model, plain)
        kinds = {"all_gather": 6, "reduce_scatter": 3} | (
            {"all_reduce": 3} if len(shape) > 1 else {}
        )
        assert calls.kinds() == kinds
        (gather,), (scatter,) = groups["gather"], groups["scatter"]
        assert (gather is scatter) is not enable
        assert dist.get_process_group_ranks(gather) == dist.get_process_group_ranks(scatter)
    assert len({id(p.reduce_scatter_group_info.group) for p in sharded.hsdp_params()}) == 1
    other = shard(LM.make(), LM, TrainOptions(mesh_shape=shape))
    other.set_separate_reduce_scatter_group()
    theirs, ours = (m.hsdp_params()[0].reduce_scatter_group_info for m in (other, sharded))
    assert theirs.group is ours.group, "one more communicator for all models"


@pytest.mark.dist
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_reduce_scatters_in_a_group_of_their_own(shape: tuple[int, ...]) -> None:
    run_ranks(separate, 2 ** len(shape), shape)


def separate_alone(rank: int, world_size: int) -> None:
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=data_mesh())
    model.set_separate_reduce_scatter_group()
    with count_collectives() as calls:
        model(torch.ones(1, 2)).sum().backward()
    assert calls.kinds() == {}


@pytest.mark.dist
def test_one_rank_needs_no_second_group() -> None:
    run_ranks(separate_alone, 1)


def two_models(rank: int, world_size: int) -> None:
    pairs = [(LM.make(), LM.make()) for _ in range(2)]
    for _, model in pairs:
        shard(model, LM, TrainOptions())
    models = [model for _, model in pairs]
    share_comm_ctx(models)
    for pair in pairs:
        for module in pair:
            inputs, targets = LM.batch(rank, 0)
            LM.loss(module(inputs), targets).backward()
        compare_mean(pair[1], pair[0])
    first, second = (model._hsdp_unit_state.context for model in models)
    assert first is not second and first.streams is second.streams
    with pytest.raises(PolicyError, match="share_comm_ctx: expected modules that fully_shard"):
        share_comm_ctx([models[0], nn.Linear(2, 2)])
    share_comm_ctx([])


@pytest.mark.dist
def test_models_that_share_their_streams() -> None:
    run_ranks(two_models, 2)


def bad_values(rank: int, world_size: int) -> None:
    model = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model, mesh=mesh)
    for value in (0, -1, True, 1.0, None):
        with pytest.raises(PolicyError, match=r"max_input_buffers: expected a positive int, got"):
            model.set_reduce_scatter_max_input_buffers(value)
    with pytest.raises(PolicyError, match="set_gradient_divide_factor: expected a positive number"):
        model.set_reduce_scatter_divide_factor(0)
    with pytest.raises(
        PolicyError, match="has replicas, so its hook runs on the stream of its own"
    ):
        model.set_all_reduce_hook(print, stream=object())


@pytest.mark.dist
def test_bad_values_are_refused() -> None:
    run_ranks(bad_values, 2)
