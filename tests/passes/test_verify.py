"""The verifier accepts every correct program, rejects every harmful mutant, and says what is wrong."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile import pipeline
from hyper_parallel.errors import PolicyError, VerificationError
from passes.base import info
from passes.verify import verify_against, verify_programs, verify_stage
from tests.fake_dist import fake_world
from tests.models import CASES
from tests.mutations import KINDS, MEMORY_KINDS, Mutant, mutants
from tests.program_cases import (
    BF16,
    DDP,
    DOUBLE,
    FP16,
    FSDP_TP,
    HSDP,
    PURE_TP,
    SEQUENCE_PARALLEL,
    SHARD,
    THREE,
    TWO,
    TWO_LAYERS,
    Graphs,
    Results,
    Setting,
    _columns,
    build,
    differs,
    full_gradient,
    layout_of,
    settings,
    simulate,
    unsharded_gradients,
)
from tests.tp_mutations import CHANGES, tp_mutants

UNEVEN_HSDP = Setting("uneven", *HSDP)
INT = Setting("uneven", *SHARD, (("reshard_after_forward", 2),))
ALL_GATHERED_OVER_TWO = (("roles", (("shard", ("dp_shard", "cp")),)),)
MUTATED = (
    UNEVEN_HSDP,
    INT,
    Setting("uneven", *SHARD, (("shard_placement_fn", _columns),)),
    Setting("frozen", *HSDP, (("mp_policy", BF16),)),
    Setting("tied", *THREE),
    Setting("two_biases", *DDP),
)
TP_LM = Setting("lm", *FSDP_TP, (("tp_plan", tuple(SEQUENCE_PARALLEL.items())),))
TP_MUTATED = (
    Setting("two_biases", *FSDP_TP, (("tp_plan", tuple(TWO_LAYERS.items())),)),
    Setting("scalar", *PURE_TP, (("tp_plan", tuple(TWO_LAYERS.items())),)),
    pytest.param(TP_LM, marks=pytest.mark.slow),
)


@functools.cache
def program(setting: Setting) -> Graphs:
    graphs = build(setting)
    for gm in graphs.values():
        gm.meta["setting"] = setting
    return graphs


@functools.cache
def reference(setting: Setting) -> Results:
    return simulate(program(setting))


def damaged(setting: Setting, kind: str, half: str = "") -> Graphs:
    """The first mutant of a kind, in one half of the program if that is asked for."""
    made = (make() for make in mutants(program(setting), kind))
    return next(m.graphs for m in made if m.where.startswith(half))


# ------------------------------------------------------------------ no false alarm


def few_settings() -> list[Setting]:
    small = [s for s in settings() if s.model in ("uneven", "frozen", "tied")]
    return [*small[::4], Setting("lm", *HSDP), *MUTATED]


@pytest.mark.parametrize("setting", dict.fromkeys(few_settings()), ids=str)
def test_correct_programs_are_accepted(setting: Setting) -> None:
    verify_programs(program(setting))


@pytest.mark.slow
@pytest.mark.parametrize("setting", [s for s in settings() if s not in few_settings()], ids=str)
def test_all_correct_programs_are_accepted(setting: Setting) -> None:
    verify_programs(build(setting))


@pytest.mark.parametrize(
    "setting",
    [
        *MUTATED[:3],
        Setting("tied", *TWO),
        Setting("uneven", (2, 3), ("dp_shard", "cp"), ALL_GATHERED_OVER_TWO),
    ],
    ids=str,
)
def test_the_programs_that_are_damaged_are_right(setting: Setting) -> None:
    """The reference of the mutants itself agrees with plain autograd on the unsharded model."""
    results, layout = reference(setting), layout_of(setting)
    plans = info(program(setting)["backward"]).params
    for fqn, expected in unsharded_gradients(setting).items():
        assert expected.abs().max() > 0
        found = full_gradient(results[fqn], plans[fqn], layout)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


# ------------------------------------------------------------------ every harmful mutant is rejected


def harm_of_accepted(mutant: Mutant, setting: Setting) -> str:
    """What is wrong with a mutant that the verifier accepts; empty for a harmless or a rejected one."""
    try:
        verify_programs(mutant.graphs)
    except VerificationError:
        return ""
    if mutant.kind in MEMORY_KINDS:
        return "it keeps a full weight"
    return differs(lambda: simulate(mutant.graphs), reference(setting))


@pytest.mark.parametrize("setting", MUTATED, ids=str)
def test_harmful_mutants_are_rejected(setting: Setting) -> None:
    tried = 0
    for kind in KINDS:
        for make in list(mutants(program(setting), kind))[:2]:
            mutant = make()
            tried += 1
            why = harm_of_accepted(mutant, setting)
            assert not why, f"accepted although harmful: {kind} at {mutant.where}: {why}"
    assert tried > 20


def test_every_kind_of_damage_finds_a_site() -> None:
    extra = (
        Setting("uneven", *HSDP, (("mp_policy", FP16),)),
        Setting("uneven", *HSDP, (("mp_policy", DOUBLE),)),
    )
    unseen = set(KINDS) - {"two outputs swapped"}
    for setting in (*MUTATED, *extra, TP_LM):
        unseen -= {k for k in unseen if next(mutants(program(setting), k), None) is not None}
    assert not unseen


def test_a_shard_that_a_tensor_parallel_operator_reads_is_an_error() -> None:
    found = [make().graphs for make in mutants(program(TP_LM), "gather replaced by own shard")]
    for graphs in found:
        with pytest.raises(VerificationError):
            verify_programs(graphs)
    assert len(found) > 3


@pytest.mark.parametrize("setting", TP_MUTATED, ids=str)
def test_harmful_changes_of_the_tensor_parallel_forward_are_rejected(setting: Setting) -> None:
    tried = 0
    for kind in CHANGES:
        for make in itertools.islice(tp_mutants(setting, kind), 1):
            mutant = make()
            tried += 1
            why = "" if mutant.refused else harm_of_accepted(mutant, setting)
            assert not why, f"accepted although harmful: {kind} at {mutant.where}: {why}"
    assert tried > 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tp pass: sum dropped", ("outer: the terms of aten.linear.default are not summed", "models.py:")),
        ("tp pass: sum doubled", ("outer: aten.linear.default is summed", "once more")),
        ("tp pass: border dropped", ("its gradient", "tensor-parallel ranks is missing", "vary")),
        ("tp pass: bias added on every rank", ("a sum, or what is added to it, was dropped, doubled or moved",)),
    ],
)  # fmt: skip
def test_the_proof_of_the_tensor_parallel_forward_says_what_is_wrong(
    kind: str, words: tuple[str, ...]
) -> None:
    text = next(tp_mutants(TP_MUTATED[0], kind))().refused
    missing = [w for w in words if w not in text]
    assert not missing, text


def test_a_swap_in_a_bucket_is_harmful() -> None:
    """The judge of the mutants is awake: it sees what the verifier rejects."""
    setting = Setting("tied", *THREE)
    for kind in (
        "pieces of a bucket swapped",
        "reduction doubled",
        "scale dropped",
        "wait dropped",
    ):
        graphs = damaged(setting, kind)
        assert differs(lambda graphs=graphs: simulate(graphs), reference(setting))


# ------------------------------------------------------------------ texts


@pytest.mark.parametrize(
    ("setting", "kind", "words"),
    [
        (UNEVEN_HSDP, "all-reduce dropped", ("layers.", "mesh dim 'dp_replicate'", "state V", "expected: state R", "path:")),
        (UNEVEN_HSDP, "reduction doubled", ("double reduction", "dp_shard", "reduced over it before")),
        (UNEVEN_HSDP, "scale dropped", ("divided by 1 instead of 4", "layers.")),
        (UNEVEN_HSDP, "scale doubled", ("divided by 16 instead of 4",)),
        (UNEVEN_HSDP, "wrong group, Comm untouched", ("is not the one it says it is", "dp_replicate", "dp_shard")),
        (UNEVEN_HSDP, "wait dropped", ("has not been waited for", "wait_tensor")),
        (UNEVEN_HSDP, "reduced in bfloat16", ("dtype", "bfloat16", "float32")),
        (UNEVEN_HSDP, "gradient not returned", ("its gradient is missing",)),
        (UNEVEN_HSDP, "full weight saved", ("saved for backward at full size", "reshards after forward")),
        (UNEVEN_HSDP, "reduce-scatter replaced by own slice", ("layers.",)),
        (Setting("tied", *THREE), "two gradients swapped", ("the gradient of", "swapped")),
        (Setting("tied", *THREE), "reduced before accumulation", ("before all terms were added",)),
        (UNEVEN_HSDP, "gather replaced by own shard", ("no whole parameter", "dp_shard", "all-gather")),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(setting: Setting, kind: str, words: tuple[str, ...]) -> None:
    with pytest.raises(VerificationError) as caught:
        verify_programs(damaged(setting, kind))
    text = str(caught.value)
    missing = [w for w in words if w not in text]
    assert not missing, text


def test_path_names_module_and_source_line() -> None:
    with pytest.raises(VerificationError) as caught:
        verify_programs(damaged(UNEVEN_HSDP, "operand rewired"))
    assert "layers" in str(caught.value) and ".py:" in str(caught.value)


# ------------------------------------------------------------------ entry points


def test_single_programs_are_compared_with_a_plan() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        case = CASES["uneven"]
        policy = hp_compile.Policy(backend="aot_eager")
        plan = hp_compile.plan(case.make(), mesh, policy, args=(case.batch(0, 0)[0],))
        plan.verify()
        for gm in plan.graphs.values():
            hp_compile.verify(gm, plan)
        broken = next(mutants(plan.graphs, "scale dropped"))().graphs["backward"]
        with pytest.raises(VerificationError, match="instead of 4"):
            hp_compile.verify(broken, plan)
        other = program(Setting("uneven", *SHARD))
        with pytest.raises(VerificationError, match="made for"):
            verify_against(other["backward"], plan.graphs)


def test_a_half_is_verified_on_its_own() -> None:
    for gm in program(INT).values():
        verify_stage(gm)
    with pytest.raises(VerificationError):
        verify_stage(damaged(INT, "bucket split at wrong places", "backward")["backward"])
    with pytest.raises(VerificationError):
        verify_stage(damaged(INT, "two gradients swapped", "backward")["backward"])


def test_every_pass_is_followed_by_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def spy(gm: Any) -> None:
        seen.append((info(gm).stage, info(gm).done[-1]))

    monkeypatch.setattr(pipeline, "verify_stage", spy)
    monkeypatch.setenv("HP_COMPILE_VERIFY", "each")
    build(Setting("two_biases", *HSDP))
    names = {name for _, name in seen}
    assert names >= {
        "annotate",
        "cleanup",
        "unshard",
        "partition",
        "reduce_grads",
        "bucket",
        "overlap",
    }
    assert {stage for stage, _ in seen} >= {"captured", "sharded", "forward", "backward"}


def test_verification_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = damaged(UNEVEN_HSDP, "scale dropped")
    monkeypatch.setenv("HP_COMPILE_VERIFY", "0")
    pipeline.prove(broken)
    monkeypatch.setenv("HP_COMPILE_VERIFY", "1")
    with pytest.raises(VerificationError):
        pipeline.prove(broken)
    monkeypatch.setenv("HP_COMPILE_VERIFY", "maybe")
    with pytest.raises(PolicyError, match="HP_COMPILE_VERIFY"):
        pipeline.prove(broken)


@pytest.mark.slow
def test_cost_is_small_beside_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_COMPILE_VERIFY", "0")
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        case = CASES["lm"]
        start = time.process_time()
        policy = hp_compile.Policy(backend="aot_eager")
        plan = hp_compile.plan(case.make(), mesh, policy, args=(case.batch(0, 0)[0],))
        captured = time.process_time() - start
        graphs = plan.graphs
        start = time.process_time()
        verify_programs(graphs)
        verified = time.process_time() - start
    print(f"capture {captured:.2f} s, verification {verified:.3f} s")
    assert verified < 0.2 * captured
