"""Saved plans: nothing is lost on the way to JSON and back, and differences are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile import serial
from hp_compile.plan_diff import compare
from tests.dist_pool import fake_world
from tests.models import CASES


def make(case: str, policy: hp_compile.Policy | None = None, program: bool = True):
    """Plan a case on 2 replicas of 4 shards, from rank 5."""
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
        inputs, _ = CASES[case].batch(0, 0)
        args = (inputs,) if program else ()
        return hp_compile.plan(CASES[case].make(), mesh, policy, args=args)


@pytest.fixture(scope="module")
def tiny() -> Iterator[hp_compile.Plan]:
    yield make("tiny", hp_compile.Policy(reshard_after_forward=2))


def test_what_is_saved_is_what_the_plan_says(tiny: hp_compile.Plan) -> None:
    saved = serial.loads(tiny.to_json())
    assert saved == serial.save(tiny)
    assert saved.fingerprint == tiny.fingerprint
    assert saved.mesh.dims == (("dp_replicate", 2), ("dp_shard", 4)) and saved.mesh.rank == 5
    assert saved.inputs == ("[0]: float32[4, 8]",)
    assert saved.collectives is not None
    for ours, theirs in zip(saved.collectives, tiny.collectives, strict=True):
        assert (ours.kind, ours.phase, ours.axes) == (theirs.kind, theirs.phase, theirs.axes)
        assert (ours.ranks, ours.params) == (theirs.ranks, theirs.params)
        assert (ours.nbytes, ours.purpose) == (theirs.nbytes, theirs.purpose)
        assert getattr(torch, ours.dtype) is theirs.dtype
    for param, plan in zip(saved.params, tiny.params.values(), strict=True):
        assert (param.fqn, param.shape, param.reduction) == (plan.fqn, plan.shape, plan.reduction)
        assert param.sharded_ranks == plan.sharded_ranks == (4, 5, 6, 7)
        assert param.unsharded_ranks == plan.unsharded_ranks == (1, 5)
        assert param.local_shape == plan.shard_shape and param.reason == plan.reason
    assert {p.unit for p in saved.params} == {"(root)", "blocks.0", "blocks.1"}


def test_inner_groups_have_names_of_their_own(tiny: hp_compile.Plan) -> None:
    document = json.loads(tiny.to_json())
    assert document["groups"] == {
        "dp_shard": [4, 5, 6, 7],
        "dp_replicate": [1, 5],
        "dp_shard/2": [4, 5],
    }
    assert {c["group"] for c in document["collectives"]} == set(document["groups"])


def test_the_text_is_stable_and_one_line_a_row(tiny: hp_compile.Plan) -> None:
    text = tiny.to_json()
    assert text == make("tiny", hp_compile.Policy(reshard_after_forward=2)).to_json()
    rows = [line for line in text.splitlines() if line.startswith('    {"fqn"')]
    assert len(rows) == len(tiny.params)


@pytest.mark.parametrize("case", ["uneven", "scalar", "frozen", "tied"])
def test_round_trip(case: str) -> None:
    plan = make(case, hp_compile.Policy(ignored_params=["*.bias"]), program=case == "uneven")
    saved = serial.save(plan, request={"model": "x:y"})
    assert serial.loads(serial.dumps(saved)) == saved
    assert (saved.collectives is None) == (case != "uneven")


def test_unknown_keys_are_ignored(tiny: hp_compile.Plan) -> None:
    document = json.loads(tiny.to_json())
    document["later"] = 1
    document["params"][0]["later"] = 1
    assert serial.loads(json.dumps(document)) == serial.save(tiny)


def test_differences(tiny: hp_compile.Plan) -> None:
    saved = serial.save(tiny)
    assert not compare(saved, serial.loads(tiny.to_json()))
    assert saved.collectives is not None
    first, *rest = saved.collectives
    # order
    swapped = replace(saved, collectives=(rest[0], first, *rest[1:]))
    assert "number 0 was all_gather of" in compare(saved, swapped).order
    # bytes
    larger = replace(saved, collectives=(replace(first, nbytes=first.nbytes + 1), *rest))
    (traffic,) = compare(saved, larger).traffic
    assert traffic.after[1] == traffic.before[1] + 1 and traffic.phase == "forward"
    # a parameter that is new, one that is gone, one that is placed elsewhere
    new = replace(saved.params[0], fqn="extra.weight")
    moved = replace(saved.params[1], placements=("R", "R"), reduction="AR")
    other = replace(saved, params=(new, moved, *saved.params[2:]))
    changes = {c.names: c.changes for c in compare(saved, other).params}
    assert changes[("extra.weight",)][0].before is None
    assert changes[(saved.params[0].fqn,)][0].after is None
    assert [c.what for c in changes[(saved.params[1].fqn,)]] == ["placement", "reduction"]
    # without a program
    bare = serial.save(make("tiny", hp_compile.Policy(reshard_after_forward=2), program=False))
    assert (
        "second plan was made without a program" in compare(saved, bare).order
        or compare(saved, bare).traffic
    )
    # only the fingerprint
    assert compare(saved, replace(saved, fingerprint="0"))
