"""The semi-private names of torch: all are known, all exist, and each does what is relied on."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from hyper_parallel import torch_compat
from hyper_parallel.torch_compat import graph, tracing
from tests.test_layering import dotted, imported_names, is_private

FOLDER = Path(torch_compat.__file__).parent


def used_names() -> set[str]:
    """Private names of torch that the folder imports or writes out in full."""
    found = set()
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        module = f"hyper_parallel.torch_compat.{path.stem}"
        found |= {name for _, name in imported_names(tree, module, False) if is_private(name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                name = (dotted(node) or "").replace("dist.", "torch.distributed.", 1)
                if name.startswith("torch.") and is_private(name):
                    found.add(name)
    return {name for name in found if name != "torch.utils._pytree"}


def test_every_name_in_use_is_listed_and_exists() -> None:
    listed = set(torch_compat.NAMES)
    unlisted = {
        name
        for name in used_names()
        if not any(name == known or known.startswith(name + ".") for known in listed)
    }
    assert not unlisted
    assert torch_compat.problems() == []


def test_missing_and_changed_names_are_told_apart() -> None:
    assert torch_compat.problems(
        {
            "torch._no_such_thing": (),
            "torch.no_module.x": (),
            "torch._guards.tracing": ("context", "nonsense"),
            "torch.nn.Linear": ("in_features",),
        }
    ) == [
        "torch._no_such_thing is missing",
        "torch.no_module.x is missing",
        "torch._guards.tracing does not take nonsense",
    ]


def test_one_line_about_an_untested_torch() -> None:
    with pytest.warns(RuntimeWarning, match=r"tested with torch 2\.13, this is 2\.99\.0: ") as seen:
        torch_compat.warn_if_untested("2.99.0")
    own = [w for w in seen if "tested with torch" in str(w.message)]
    assert len(own) == 1 and "\n" not in str(own[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_compat.warn_if_untested("2.13.1+cpu")


def test_joint_trace_carries_descriptors() -> None:
    mode = graph.fake_mode()
    with mode:
        module = nn.Linear(3, 2)
        x = torch.empty(4, 3)
    gm, _ = graph.joint_trace(module, [x], mode, {})
    kinds = [type(n.meta["desc"]).__name__ for n in gm.graph.nodes if n.op == "placeholder"]
    assert kinds == ["ParamAOTInput", "ParamAOTInput", "PlainAOTInput", "TangentAOTInput"]
    out = next(iter(reversed(gm.graph.nodes)))
    names = [type(d).__name__ for d in out.meta["desc"] if d is not None]
    assert names == ["PlainAOTOutput", "GradAOTOutput", "GradAOTOutput"]


def test_autograd_functions_are_seen_however_they_are_called() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    stored, seen = Same.apply, []
    with graph.refuse_autograd_functions(lambda cls, args: seen.append(cls.__name__)):
        stored(torch.ones(2))
        Same.apply(torch.ones(2))
    stored(torch.ones(2))
    assert seen == ["Same", "Same"]


def test_writes_are_found_through_views() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.zeros(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept[0] = 1.0
            return x + self.kept

    exported = torch.export.export(Writes(), (torch.ones(3),), strict=False)
    written = [s.name for n in exported.graph.nodes for s in graph.written_arguments(n)]
    assert written == ["c_kept"]
    assert graph.is_higher_order(torch.ops.higher_order.cond)
    assert not graph.is_higher_order(torch.ops.aten.add.Tensor)


def test_operators_that_make_memory() -> None:
    """A composite operator is not believed: dropout in evaluation returns its input."""
    nodes = fx.Graph()
    x = nodes.placeholder("x")
    aten = torch.ops.aten
    made = {
        op: graph.makes_memory(nodes.call_function(op, (x,)))
        for op in (aten.exp.default, aten.view.default, aten.add_.Tensor, aten.dropout.default)
    }
    assert list(made.values()) == [True, False, False, False]
    assert not graph.makes_memory(x)


PLAN_WITH_TRACE = """
import torch
from tests.passes.programs import plan_blocks
plan_blocks((2,), count=1)
"""


PLAN_WITH_TENSOR_PARALLEL = """
import torch
from tests.cost.plans import make_plan
from tests.models import CASES
plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
make_plan(CASES["tiny"].make(), (torch.ones(2, 8),), (1, 2), names=("dp_shard", "tp"), tp_plan=plan)
"""
PASSES = [
    "hp_compile_captured_annotate",
    "hp_compile_captured_cleanup",
    "hp_compile_sharded_unshard",
    "hp_compile_forward_partition",
    "hp_compile_backward_partition",
    "hp_compile_forward_bucket",
    "hp_compile_forward_overlap",
    "hp_compile_backward_reduce_grads",
    "hp_compile_backward_bucket",
    "hp_compile_backward_overlap",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "before", "line"),
    [
        (PLAN_WITH_TRACE, [], "# reduce_grad over dp_shard"),
        (
            PLAN_WITH_TENSOR_PARALLEL,
            ["hp_compile_exported_tensor_parallel"],
            "= total(",
        ),
    ],
    ids=["data", "tensor"],
)
def test_the_program_after_every_pass_is_in_the_structured_trace(
    tmp_path: Path, code: str, before: list[str], line: str
) -> None:
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path), "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=environment)
    (log,) = tmp_path.glob("*.log")
    text = log.read_text()
    assert re.findall(r'"name": "(hp_compile_\w+)"', text) == before + PASSES
    assert line in (text.partition(PASSES[0])[0] if before else text)
    assert "= <function" not in text


def test_no_text_is_made_without_a_trace() -> None:
    made: list[str] = []

    def make() -> str:
        made.append("text")
        return "text"

    handlers = tracing.trace_structured.__globals__["trace_log"].handlers
    kept, handlers[:] = list(handlers), []
    try:
        tracing.trace_artifact("unread", make)
    finally:
        handlers[:] = kept
    assert made == []
