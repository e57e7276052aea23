"""A request: everything that a plan is made from, as a value that goes into the plan's file and comes back from it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hp_compile
from hp_compile import serial
from hp_compile.cli.errors import RequestError
from hp_compile.cli.inputs import example_inputs
from hp_compile.cli.models import build_model
from hp_compile.cli.progress import Report
from hp_compile.plan import Plan
from hp_compile.policy_file import load_policy
from hyper_parallel.mesh import infer_roles

Dims = tuple[tuple[str, int], ...]
_DIM = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9]\d*)\s*")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan; paths are relative to ``root``.

    Attributes:
        model: MODEL.
        mesh: name and size of every mesh dim.
        rank: the rank whose view is planned.
        policy: TOML file, or ``None``.
        tp_plan: ``"auto"`` or ``None``.
        inputs: specs of example inputs; none for tokens.
        batch: sequences on a rank.
        seq: tokens in a sequence; ``None`` for the model's limit.
        build_on: device on which the model is built.
        params_only: do not capture, so that the plan knows parameters only.
        root: directory that paths and modules are looked up from.
    """

    model: str
    mesh: Dims
    rank: int = 0
    policy: str | None = None
    tp_plan: str | None = None
    inputs: tuple[str, ...] = ()
    batch: int = 2
    seq: int | None = None
    build_on: str = "meta"
    params_only: bool = False
    root: Path = Path()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.mesh)

    def values(self, folder: Path | None) -> dict[str, Any]:
        """The request as plain values for a file.

        Args:
            folder: where the file will lie; ``root`` is written relative to it. ``None`` when unknown.
        """
        found: dict[str, Any] = {
            spec.name: getattr(self, spec.name)
            for spec in fields(self)
            if spec.name in ("model", "mesh") or getattr(self, spec.name) != spec.default
        }
        found.pop("root", None)
        found["mesh"] = mesh_text(self.mesh)
        if self.inputs:
            found["inputs"] = list(self.inputs)
        if folder is not None:
            found["root"] = os.path.relpath(self.root.resolve(), folder.resolve())
        return found

    def command(self) -> str:
        """The shell command that makes this plan, to be run in ``root``."""
        words = ["hp-compile", "plan", self.model, "--mesh", mesh_text(self.mesh)]
        flags: tuple[tuple[str, object], ...] = (
            ("--policy", self.policy),
            ("--tp-plan", self.tp_plan),
            ("--world-rank", self.rank or None),
            ("--batch", self.batch if self.batch != 2 else None),
            ("--seq", self.seq),
            ("--build-on", self.build_on if self.build_on != "meta" else None),
            *(("--inputs", spec) for spec in self.inputs),
        )
        words += [word for flag, value in flags if value is not None for word in (flag, str(value))]
        return shlex.join([*words, "--params-only"] if self.params_only else words)


def parse_mesh(text: str) -> Dims:
    """Reads ``dp_replicate=2,dp_shard=4``.

    Raises:
        RequestError: it is written differently, or names a dim twice.
    """
    dims = []
    for part in text.split(","):
        match = _DIM.fullmatch(part)
        if match is None:
            raise RequestError(
                f"--mesh {text!r}: expected name=size,... such as dp_replicate=16,dp_shard=8, got {part.strip()!r}"
            )
        dims.append((match[1], int(match[2])))
    names = [name for name, _ in dims]
    if len(set(names)) < len(names):
        raise RequestError(f"--mesh {text!r}: a mesh dim is named twice")
    return tuple(dims)


def mesh_text(dims: Dims) -> str:
    """Writes mesh dims as :func:`parse_mesh` reads them."""
    return ",".join(f"{name}={size}" for name, size in dims)


def request(
    model: str | None,
    mesh: str | None = None,
    *,
    base: PlanRequest | None = None,
    **options: Any,
) -> PlanRequest:
    """The request of a command line.

    Args:
        model: MODEL, or the file of a saved plan, whose request then gives the defaults; ``None`` with a base.
        mesh: text of ``--mesh``.
        base: the defaults.
        **options: other fields of :class:`PlanRequest`; ``None`` for those that are not given.

    Raises:
        RequestError: the mesh is missing or wrong, or a value is.
    """
    given = {name: value for name, value in options.items() if value is not None and value != []}
    if model is not None and is_saved_plan(model):
        base = saved_request(Path(model))
    elif model is not None:
        given["model"] = model
    if "policy" in given:
        path = given["policy"]
        given["policy"] = str(path) if base is None else os.path.relpath(path, base.root)
    if "inputs" in given:
        given["inputs"] = tuple(given["inputs"])
    if mesh is not None:
        given["mesh"] = parse_mesh(mesh)
    if base is not None:
        return _checked(replace(base, **given))
    if "mesh" not in given:
        raise RequestError("--mesh is missing: name the mesh dims, such as --mesh dp_shard=8")
    return _checked(PlanRequest(**given))


def _checked(asked: PlanRequest) -> PlanRequest:
    if not 0 <= asked.rank < asked.world_size:
        raise RequestError(
            f"--world-rank {asked.rank}: mesh {mesh_text(asked.mesh)} has the ranks 0 to {asked.world_size - 1}"
        )
    if asked.build_on not in ("meta", "cpu"):
        raise RequestError(f"--build-on {asked.build_on!r}: expected meta or cpu")
    return replace(asked, root=asked.root.resolve())


def is_saved_plan(model: str) -> bool:
    """Whether MODEL is the name of a saved plan."""
    return model.endswith(".json") and not model.startswith("hf:")


def saved_request(path: Path) -> PlanRequest:
    """The request that a saved plan was made from.

    Raises:
        HPCompileError: no saved plan, or one without a request.
    """
    values = serial.load(path).request
    if values is None:
        raise RequestError(
            f"{path}: the plan does not say what it was made from (Plan.to_json does not know); give MODEL and --mesh too"
        )
    return from_values(values, path)


def from_values(values: Mapping[str, Any], path: Path) -> PlanRequest:
    """Reads what :meth:`PlanRequest.values` wrote.

    Args:
        values: the values.
        path: the file that they are from.

    Raises:
        RequestError: they are no request.
    """
    known = {spec.name for spec in fields(PlanRequest)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise RequestError(f"{path}: the request has the unknown key {unknown[0]!r}")
    given = dict(values)
    try:
        given["mesh"] = parse_mesh(given["mesh"])
        given["inputs"] = tuple(given.get("inputs", ()))
        given["root"] = path.parent / given["root"] if "root" in given else Path()
        return _checked(PlanRequest(**given))
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path}: the request in it is damaged: {error!r}") from error


# ------------------------------------------------------------------ carrying it out


@contextlib.contextmanager
def planned(asked: PlanRequest, say: Report) -> Iterator[Plan]:
    """Makes the plan of a request; the fake world that it belongs to lives as long as the block.

    Args:
        asked: the request.
        say: told what is being done.

    Raises:
        HPCompileError: it cannot be made; the text says why.
    """
    names, sizes = zip(*asked.mesh, strict=True)
    with _inside(asked.root):
        policy = _policy(asked)
        infer_roles(names, sizes, policy.roles)  # before a model is built for a mesh without roles
        with _fake_world(asked) as mesh:
            yield _plan(asked, policy, mesh, say)


def _plan(asked: PlanRequest, policy: hp_compile.Policy, mesh: DeviceMesh, say: Report) -> Plan:
    say(f"building {asked.model}")
    model = build_model(asked.model, asked.build_on)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if not asked.params_only:
        args, kwargs = example_inputs(model, asked.inputs, asked.batch, asked.seq)
    say("capturing the model")
    plan = hp_compile.plan(model, mesh, policy, args=args, kwargs=kwargs)
    if plan.has_program:
        say("running the passes")
        _ = plan.graphs
    say("reading the plan")
    return plan


def _policy(asked: PlanRequest) -> hp_compile.Policy:
    policy = load_policy(asked.policy) if asked.policy is not None else hp_compile.Policy()
    if asked.tp_plan is not None:
        policy = replace(policy, tp_plan=asked.tp_plan)
    return policy


@contextlib.contextmanager
def _inside(root: Path) -> Iterator[None]:
    """Makes ``root`` the working directory and the first place where modules are looked up."""
    before, path = Path.cwd(), list(sys.path)
    if not root.is_dir():
        raise RequestError(f"the directory {root} that the plan was made in does not exist")
    os.chdir(root)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path


@contextlib.contextmanager
def _fake_world(asked: PlanRequest) -> Iterator[DeviceMesh]:
    """A process group of the whole world that moves no data, and the mesh on it."""
    if dist.is_initialized():
        raise RequestError("a process group exists already in this process; the command makes one")
    dist.init_process_group("fake", rank=asked.rank, world_size=asked.world_size)
    try:
        names = tuple(name for name, _ in asked.mesh)
        sizes = tuple(size for _, size in asked.mesh)
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


__all__ = ["PlanRequest", "from_values", "is_saved_plan", "planned", "request", "saved_request"]
