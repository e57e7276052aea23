"""Weights of sharded models into safetensors files and back, between meshes and with `transformers`."""

from __future__ import annotations

import copy
import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile import HPCompileError, Policy, load_safetensors, save_safetensors
from tests.baselines import full_weights
from tests.dist_pool import run_ranks
from tests.distributed.test_hf import make
from tests.distributed.test_state_dict import Live, assert_equal_state
from tests.distributed.test_state_tensor_parallel import LM, PACKED, PACKED_PLAN
from tests.distributed.test_tensor_parallel import SEQUENCE, VOCABULARY
from tests.models import CASES, ModelCase

pytest.importorskip("safetensors")
pytestmark = pytest.mark.dist

SHARD_TP = (2, 2), ("dp_shard", "tp")


def shard(
    case: ModelCase, on: Any = SHARD_TP, seed: int = 0, meta: bool = False, **fields: Any
) -> Any:
    shape, names = on
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if meta:
        with torch.device("meta"):
            model = case.factory()
    else:
        model = case.make(seed)
    return hp_compile.shard(model, mesh, Policy(backend="aot_eager", **fields))


def files_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


# Model, mesh, policy; between them all placements: strided and uneven, packed, scalar, empty, ignored, with buffers.
ROWS: dict[str, tuple[ModelCase, Any, dict[str, Any]]] = {
    "vocabulary": (LM, SHARD_TP, {"tp_plan": VOCABULARY}),
    "tp×dp": (LM, ((2, 2), ("tp", "dp_shard")), {"tp_plan": SEQUENCE}),
    "packed": (PACKED, SHARD_TP, {"tp_plan": PACKED_PLAN}),
    "several dims": (CASES["uneven"], ((2, 2), ("a", "b")), {"roles": {"shard": ("a", "b")}}),
    "replicas": (CASES["scalar"], ((2, 2), ("dp_replicate", "dp_shard")), {}),
    "ignored": (CASES["tied"], ((4,), ("dp_shard",)), {"ignored_params": ("leave.*",)}),
    "buffers": (CASES["int_buffers"], ((4,), ("dp_shard",)), {"enable_param_shard": False}),
}


def out_and_in(rank: int, world_size: int, folder: str) -> None:
    for number, (label, (case, on, fields)) in enumerate(ROWS.items()):
        plain = case.make()
        expected = plain.state_dict()
        where = Path(folder) / str(number)
        save_safetensors(shard(case, on, **fields), where, max_shard_size=600)
        found = files_of(where)
        tied = {"head.weight", "second.weight"} & (expected.keys() - found.keys())
        assert found.keys() == expected.keys() - tied, label
        assert bool(tied) == (case.name in ("lm_small", "tied")), label
        assert all(torch.equal(v, expected[n]) for n, v in found.items()), label
        for meta in (False, True):
            model = shard(case, on, seed=3, meta=meta, **fields)
            params = list(model.parameters())
            optimizer = torch.optim.SGD(params, 0.1)
            if case.name == "int_buffers" and meta:  # no checkpoint has it
                model.offset = plain.offset
            report = load_safetensors(model, where)
            assert report == ([], [])
            assert_equal_state(model, expected, f"{label}, meta={meta}")
            assert all(p is q for p, q in zip(params, model.parameters(), strict=True)), label
            inputs, targets = case.batch(0, 0)
            output = model(inputs)
            torch.testing.assert_close(output, case.make()(inputs))
            if not meta:
                continue
            case.loss(output, targets).backward()  # and it trains, with the optimizer from before
            optimizer.step()
            assert any(not torch.equal(v, expected[n]) for n, v in full_weights(model).items())


@pytest.mark.slow
def test_files_hold_the_plain_weights_and_load_again(tmp_path: Path) -> None:
    run_ranks(out_and_in, 4, str(tmp_path), timeout=500)


def one_at_a_time(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    """How many tensors of full size are alive at a time in a save and in a load."""
    case = CASES["lm"]
    biggest = max(p.numel() for p in case.make().parameters())
    model = shard(case, tp_plan=VOCABULARY)
    gc.collect()
    with Live(biggest) as saving:
        save_safetensors(model, folder)
    target = shard(case, seed=1, tp_plan=VOCABULARY)
    with Live(biggest) as loading:
        load_safetensors(target, folder)
    assert_equal_state(target, case.make().state_dict(), "loaded")
    return saving.most, loading.most


def test_one_full_tensor_at_a_time(tmp_path: Path) -> None:
    for saving, loading in run_ranks(one_at_a_time, 4, str(tmp_path)):
        assert saving <= 2  # the tensor, and the pieces that it is gathered from
        assert loading <= 1  # the file, mapped into memory


def refused(rank: int, world_size: int, folder: str) -> None:
    from safetensors.torch import save_file

    case = CASES["tied"]
    with pytest.raises(HPCompileError, match=r"expected a model that hp_compile\.shard returned"):
        save_safetensors(case.make(), folder)
    model = shard(case, tp_plan={"enter": "colwise", "first": "rowwise"})
    before = full_weights(model)
    state = {n: v.clone() for n, v in case.make(1).state_dict().items() if n != "second.weight"}
    changes: dict[str, tuple[dict[str, Tensor], Any, str]] = {
        "lacks": ({k: v for k, v in state.items() if k != "enter.bias"}, HPCompileError,
                  r"does not fit TiedMLP: missing: enter\.bias\. Nothing was loaded"),
        "tied": ({k: v for k, v in state.items() if k != "first.weight"}, HPCompileError,
                 r"missing: first\.weight"),
        "more": ({**state, "spare": torch.zeros(1)}, HPCompileError, "unexpected: spare"),
        "shape": ({**state, "leave.weight": torch.zeros(5, 9)}, ValueError,
                  r"leave\.weight: .*shape\.safetensors has shape \[5, 9\], the model \[5, 8\]"),
        "other": ({**state, "second.weight": torch.zeros(8, 8)}, ValueError,
                  r"first\.weight and second\.weight are one parameter .* different values"),
    }  # fmt: skip
    for name, (tensors, kind, message) in changes.items():
        path = Path(folder) / f"{rank}{name}.safetensors"
        save_file(tensors, path)
        with pytest.raises(kind, match=message):
            load_safetensors(model, path)
        assert all(torch.equal(v, before[n]) for n, v in full_weights(model).items()), name
    report = load_safetensors(model, Path(folder) / f"{rank}lacks.safetensors", strict=False)
    assert report.missing_keys == ["enter.bias"] and report.unexpected_keys == []
    assert torch.equal(model.enter.bias.full_tensor(), before["enter.bias"])
    assert torch.equal(model.second.weight.full_tensor(), state["first.weight"])
    # Under the other name of a tied weight, and in another dtype.
    renamed = {n.replace("first.weight", "second.weight"): v.bfloat16() for n, v in state.items()}
    save_file(renamed, Path(folder) / f"{rank}half.safetensors")
    load_safetensors(model, Path(folder) / f"{rank}half.safetensors")
    for name, value in full_weights(model).items():
        assert value.dtype == torch.float32 and torch.equal(value, state[name].bfloat16().float())
    counting = shard(CASES["int_buffers"])
    wrong = {**CASES["int_buffers"].make().state_dict(), "calls": torch.tensor(1.0)}
    save_file(wrong, Path(folder) / f"{rank}float.safetensors")
    with pytest.raises(ValueError, match=r"calls: .* has dtype F32, the model torch\.int64"):
        load_safetensors(counting, Path(folder) / f"{rank}float.safetensors")
    with pytest.raises(HPCompileError, match="keys: the model has no head"):
        save_safetensors(model, folder, keys=["head", "enter.bias"])
    with pytest.raises(HPCompileError, match="still on the meta device"):
        save_safetensors(shard(case, meta=True), folder)
    # A folder that cannot be made is an error on all ranks, and no rank waits for ever.
    (Path(folder) / "file").touch()
    with pytest.raises(RuntimeError, match=r"cannot write|could not write"):
        save_safetensors(model, Path(folder) / "file" / "folder")
    part = Path(folder) / "part"
    save_safetensors(model, part, keys=["enter.bias", "second.weight"])
    assert files_of(part).keys() == {"enter.bias", "second.weight"}


def test_what_does_not_fit_is_named_before_anything_is_written(tmp_path: Path) -> None:
    run_ranks(refused, 4, str(tmp_path), timeout=400)


# ------------------------------------------------------------------ transformers


def hugging_face(rank: int, world_size: int, folder: str, name: str) -> None:
    import transformers

    plain: Any = make(name, 2).eval()
    config = copy.deepcopy(plain.config)
    if rank == 0:
        plain.save_pretrained(f"{folder}/theirs", max_shard_size="8KB")
    mesh = init_device_mesh("cpu", *SHARD_TP[:1], mesh_dim_names=SHARD_TP[1])
    torch.distributed.barrier()
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(
        config=config
    )  # no checkpoint holds its buffers
    hp_compile.shard(model.eval(), mesh, Policy(backend="aot_eager", tp_plan="auto"))
    load_safetensors(model, f"{folder}/theirs")
    tokens = torch.randint(48, (2, 8), generator=torch.Generator().manual_seed(7))
    call = functools.partial(logits, tokens=tokens)
    torch.testing.assert_close(call(model), call(plain))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.25)
    save_safetensors(model, f"{folder}/ours", max_shard_size="8KB")
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/ours")
    assert type(again) is type(plain)
    assert not torch.allclose(call(plain), call(model))
    torch.testing.assert_close(call(again.eval()), call(model))
    for key, value in full_weights(again).items():
        assert torch.equal(value, model.get_parameter(key).full_tensor()), key


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])  # qwen3's head is its embedding
def test_hugging_face_reads_ours_and_we_read_theirs(name: str, tmp_path: Path) -> None:
    run_ranks(hugging_face, 4, str(tmp_path), name, timeout=600)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 1
