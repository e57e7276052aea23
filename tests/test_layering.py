"""What may import what, read from the source: the layers, and one home for semi-private torch.

    hyper_parallel   torch and the standard library; torch.fx only in torch_compat
    passes           also hyper_parallel
    hp_compile       also passes; tomli stands in for tomllib on Python 3.10
    hp_compile.cli   also typer, rich and transformers; nothing imports it but `__main__`
    hp_compile.cost  also sympy; hp_compile.page also jinja2 and bokeh, when a page is rendered;
                     hp_compile.safetensors_file also safetensors, when a file is read

Only `hyper_parallel/torch_compat` touches a name of torch that starts with an underscore,
`torch.fx.experimental`, functorch, or the insides of a DTensor. Operators are no private API:
neither their namespaces (`torch.ops._c10d_functional`), which graphs are written in, nor the
documented `torch._foreach_*` family.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPAT = "hyper_parallel.torch_compat"
ALLOWED = {
    "hyper_parallel": {"torch", "hyper_parallel"},
    "passes": {"torch", "hyper_parallel", "passes"},
    "hp_compile": {"torch", "hyper_parallel", "passes", "hp_compile", "tomli"},
}
CLI = "hp_compile.cli"
#: What one folder of a package may import beyond the rest of it, and nobody else.
EXTRA = {
    CLI: {"typer", "rich", "transformers"},
    "hp_compile.__main__": {"typer", "rich", "transformers"},
    "hp_compile.cost": {"sympy"},
    "hp_compile.page": {"jinja2", "bokeh"},
    "hp_compile.safetensors_file": {"safetensors"},
}
PACKAGES = [package for package in ALLOWED if (ROOT / package).is_dir()]
SCRIPTS = ("examples", "benchmarks")  # any import they like, but no private torch
DTENSOR_INSIDES = frozenset({"_local_tensor", "_spec"})


def module_name(path: Path) -> str:
    """Return the dotted name of a source file of this repository."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield the line and the full dotted name of everything that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                up = node.level - 1 if is_package else node.level
                base = ".".join([*parents[: len(parents) - up], *filter(None, [base])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def is_inside(module: str, package: str) -> bool:
    """Tell whether a dotted name is a package or lies in it."""
    return module == package or module.startswith(package + ".")


def is_private(name: str) -> bool:
    """Tell whether a dotted name is semi-private ground of torch."""
    root, *parts = name.split(".")
    if root == "functorch":
        return True
    if root != "torch" or not parts or parts[0] == "ops" or parts[0].startswith("_foreach_"):
        return False
    if parts[:2] == ["fx", "experimental"]:
        return True
    return any(p.startswith("_") and not p.endswith("__") for p in parts)


def is_fx(name: str) -> bool:
    """Tell whether a dotted name lies in torch.fx."""
    return name == "torch.fx" or name.startswith("torch.fx.")


def dotted(node: ast.AST) -> str | None:
    """Return `a.b.c` for a chain of attributes, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return one sentence for each rule that a module of this repository breaks."""
    tree = ast.parse(source)
    found: list[str] = []
    layer = module.split(".")[0]
    compat = is_inside(module, COMPAT)
    cli = is_inside(module, CLI) or module == "hp_compile.__main__"
    allowed = ALLOWED.get(layer)
    if allowed is not None:
        allowed = allowed.union(*(more for name, more in EXTRA.items() if is_inside(module, name)))
    used = list(imported_names(tree, module, is_package))
    if allowed is not None:
        for line, name in used:
            root = name.split(".")[0]
            if root not in allowed and root not in sys.stdlib_module_names:
                found.append(f"{module}:{line} imports {name}; {layer} may import {allowed}")
            if is_inside(name, CLI) and not cli:
                found.append(f"{module}:{line} imports {name}; only the command line itself may")
    if compat:
        return found
    aliases = {"torch": "torch", "dist": "torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if (name := dotted(node)) is not None:
                root, _, rest = name.partition(".")
                if root in aliases:
                    used.append((node.lineno, f"{aliases[root]}.{rest}"))
            if node.attr in DTENSOR_INSIDES:
                found.append(f"{module}:{node.lineno} uses {node.attr} of a DTensor")
        elif isinstance(node, ast.Constant) and node.value in DTENSOR_INSIDES:
            found.append(f"{module}:{node.lineno} names {node.value!r} of a DTensor")
    for line, name in used:
        if is_private(name):
            found.append(f"{module}:{line} uses {name}; only {COMPAT} may")
        if layer == "hyper_parallel" and is_fx(name):
            found.append(f"{module}:{line} uses {name}; hyper_parallel knows no graphs")
    return list(dict.fromkeys(found))


def sources(*folders: str) -> list[Path]:
    """Return all source files below these folders of the repository."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_folders_are_packages() -> None:
    folders = {path.parent for path in sources(*PACKAGES, "tests")}
    missing = [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()]
    missing += [f"{p}/py.typed" for p in PACKAGES if not (ROOT / p / "py.typed").exists()]
    assert not missing


def test_layers_and_private_torch() -> None:
    found = [
        text
        for path in sources(*ALLOWED, *SCRIPTS)
        for text in violations(
            path.read_text(), module_name(path), is_package=path.name == "__init__.py"
        )
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("hyper_parallel.mesh", "import numpy", "imports numpy"),
        ("hyper_parallel.mesh", "from passes import base", "imports passes.base"),
        ("hyper_parallel.mesh", "from ..passes.base import X", "imports passes.base.X"),
        ("hyper_parallel.mesh", "import torch.fx as fx", "knows no graphs"),
        ("hyper_parallel.mesh", "from torch import fx", "knows no graphs"),
        ("hyper_parallel.mesh", "import torch\nx: torch.fx.Graph", "knows no graphs"),
        ("passes.bucket", "import hp_compile", "imports hp_compile"),
        ("passes.bucket", "def f():\n    import torch._inductor", "only hyper_parallel"),
        ("passes.bucket", "from torch import _inductor", "only hyper_parallel"),
        ("passes.bucket", "from torch.utils import _pytree", "torch.utils._pytree"),
        ("passes.bucket", "from torch.fx.experimental import proxy_tensor", "only hyper"),
        ("passes.bucket", "import torch\ntorch._C._x()", "torch._C._x"),
        ("hp_compile.api", "import functorch", "imports functorch"),
        ("hp_compile.api", "import safetensors", "imports safetensors"),
        ("hp_compile.api", "dist.distributed_c10d._world", "distributed_c10d._world"),
        ("hp_compile.api", "importlib.import_module('torch._dynamo')", "torch._dynamo"),
        ("hp_compile.api", "x._local_tensor", "uses _local_tensor"),
        ("hp_compile.api", "getattr(x, '_spec')", "names '_spec'"),
        ("hp_compile.api", "import sympy", "imports sympy"),
        ("hp_compile.costs", "import sympy", "imports sympy"),
        ("hp_compile.cost.model", "import bokeh.plotting", "imports bokeh.plotting"),
        ("examples.train", "import torch._dynamo", "torch._dynamo"),
        ("hp_compile.plan", "import rich.table", "imports rich.table"),
        ("hp_compile.plan", "from hp_compile.cli import text", "only the command line itself"),
        ("hp_compile.clip", "import typer", "imports typer"),
        ("hp_compile.cli.plan", "import numpy", "imports numpy"),
    ],
)
def test_each_rule_bites(module: str, source: str, expected: str) -> None:
    found = violations(source, module)
    assert len(found) >= 1
    assert expected in found[0] or expected in found[-1]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "hyper_parallel.mesh",
            "import math\nimport torch.distributed as dist\nfrom . import plan",
        ),
        ("hyper_parallel.torch_compat.graph", "import torch._inductor\nimport torch.fx\nx._spec"),
        ("passes.bucket", "import torch.fx\nfrom hyper_parallel.plan import ParamPlan"),
        ("passes.bucket", "import torch\ntorch.ops._c10d_functional.wait_tensor.default"),
        ("passes.bucket", "import torch\ntorch._foreach_mul_([], 1.0)"),
        ("hp_compile.api", "import torch\nimport passes.base\ntorch.__version__\nself._spec_x"),
        ("hp_compile.cost.model", "import sympy\nfrom hp_compile.plan import Plan"),
        ("hp_compile.page", "from jinja2 import Environment\nimport bokeh.plotting"),
        ("examples.train", "import transformers\nimport hp_compile"),
        ("hp_compile.cli.plan", "import rich\nimport typer\nfrom hp_compile.cli import text"),
        ("hp_compile.__main__", "from hp_compile.cli.app import main"),
    ],
)
def test_what_is_allowed(module: str, source: str) -> None:
    assert violations(source, module) == []


IMPORT_AND_LOOK = """
import multiprocessing, os, sys, threading, torch
before = (dict(os.environ), threading.active_count(), torch.get_rng_state().sum().item())
import {packages}
import torch.distributed as dist
after = (dict(os.environ), threading.active_count(), torch.get_rng_state().sum().item())
assert before == after, "environment, threads or random state changed"
assert not multiprocessing.active_children(), "started a process"
assert not dist.is_initialized(), "initialised a process group"
assert not {{"bokeh", "jinja2", "hp_compile.cost", "hp_compile.page"}} & set(sys.modules), "heavy"
assert not torch.cuda.is_initialized(), "initialised CUDA"
assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
"""


def test_import_has_no_side_effects() -> None:
    code = IMPORT_AND_LOOK.format(packages=", ".join(PACKAGES))
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
