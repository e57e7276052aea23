"""A sharded model's weights out of and into Hugging Face's safetensors files, a tensor at a time.

Saving makes one parameter full at a time on all ranks and the first rank appends it to a file: beside its shards a rank
holds one full tensor, and while it is gathered also its pieces. Loading is not collective: each rank maps the files into
memory and copies its own slice of each parameter out of them, so no full parameter is made at all.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from hp_compile.check import names as shortened
from hp_compile.module import is_sharded
from hp_compile.runtime import Runtime
from hp_compile.safetensors_file import Entry, FolderWriter, Reader, bytes_of, read, split
from hp_compile.state import ParamState
from hyper_parallel.errors import HPCompileError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.placement import take_model_parallel_part, take_shard
from hyper_parallel.plan import ParamPlan
from hyper_parallel.torch_compat.distributed import (
    local_tensor,
    shard_dim_of,
    split_factor_of,
    strided_shard,
)

__all__ = ["IncompatibleKeys", "load_safetensors", "save_safetensors"]


class IncompatibleKeys(NamedTuple):
    """What did not fit together in a load that is not strict.

    Attributes:
        missing_keys: names of the model that the files lack; a tied parameter under its first name.
        unexpected_keys: names in the files that the model lacks.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


# ------------------------------------------------------------------ saving


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    keys: Iterable[str] | None = None,
) -> None:
    """Writes full weights as ``transformers`` does, so that ``from_pretrained`` loads the folder.

    Collective over the mesh; its first rank writes. Names are those of the plain model's ``state_dict()``, a tied parameter
    once, under its first name. If all keys are saved, a model with a ``config`` that can save itself gets its
    ``config.json`` too. Files have temporary names until all are complete. A rank holds one full tensor at a time (and its
    pieces while it is gathered), whatever ``max_shard_size`` is: files are written as streams.

    Args:
        model: a sharded model.
        folder: where to; what an earlier save left there is replaced.
        max_shard_size: largest size of a file, in bytes or as text such as ``"5GB"``; a larger tensor gets its own file.
        keys: names to save, e.g. of adapters only; all by default.

    Raises:
        HPCompileError: not a sharded model, a weight on meta, an unknown key, state that is no tensor, or a size that
            is none. Nothing is written then.
        RuntimeError: the first rank could not write; raised on all ranks.

    Example:
        >>> hp_compile.save_safetensors(model, "checkpoint")  # doctest: +SKIP
        >>> AutoModelForCausalLM.from_pretrained("checkpoint")  # doctest: +SKIP
    """
    runtime = _runtime(model, "save_safetensors")
    limit = bytes_of(max_shard_size)
    runtime.current_plans()
    values = _to_save(model, runtime, keys)
    files = split([_entry(name, value) for name, value in values.items()], limit)
    for entries in files.values():
        for entry in entries:
            entry.format_dtype  # noqa: B018 - raises before anything is written
    writer: FolderWriter | None = None
    failure: Exception | None = None
    first = runtime.layout.rank == runtime.layout.ranks[0]
    # A first rank that fails goes on gathering: the others wait for it there.
    try:
        writer = FolderWriter(Path(folder), files) if first else None
    except OSError as error:
        failure = error
    for name, entries in files.items():
        for entry in entries:
            value = _full(values[entry.name])
            if writer is not None and failure is None:
                try:
                    writer.write(name, entry, value)
                except OSError as error:
                    failure = error
            del value
    if writer is not None:
        try:
            writer.close()
            if failure is None:
                writer.finish()
            if failure is None and keys is None:
                _save_config(model, runtime, Path(folder))
        except OSError as error:
            failure = error
    _agree(runtime, failure, folder)


def _to_save(
    model: nn.Module, runtime: Runtime, keys: Iterable[str] | None
) -> dict[str, torch.Tensor | ParamState]:
    """What is saved under which name: tensors, and states of parameters."""
    by_name, _ = _states_by_name(model, runtime)
    state = model.state_dict()
    wanted = set(state if keys is None else keys)
    if not wanted <= state.keys():
        raise HPCompileError(f"keys: the model has no {shortened(sorted(wanted - state.keys()))}")
    found: dict[str, torch.Tensor | ParamState] = {}
    done: set[str] = set()
    for name, value in state.items():
        known = by_name.get(name)
        if name not in wanted or (known is not None and known.plan.fqn in done):
            continue
        if not isinstance(value, torch.Tensor):
            raise HPCompileError(
                f"{name}: a {type(value).__name__}, but safetensors files hold tensors only; save the model with "
                "torch.distributed.checkpoint, or leave it out with keys="
            )
        if value.is_meta:
            raise HPCompileError(f"{name}: still on the meta device; there are no weights to save")
        if known is not None:
            done.add(known.plan.fqn)
        found[name] = value if known is None else known
    return found


def _entry(name: str, value: torch.Tensor | ParamState) -> Entry:
    if isinstance(value, ParamState):
        return Entry(name, value.param.dtype, tuple(value.plan.shape))
    return Entry(name, value.dtype, tuple(value.shape))


@torch.no_grad()
def _full(value: torch.Tensor | ParamState) -> torch.Tensor:
    """The full tensor; collective for a parameter."""
    if isinstance(value, torch.Tensor):
        return value
    local = value.local()
    if value.plan.ignored:
        return local
    return value.to_dtensor(local.to(value.home.device)).full_tensor()


def _save_config(model: nn.Module, runtime: Runtime, folder: Path) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [runtime.original_class.__name__]
        config.save_pretrained(folder)


def _agree(runtime: Runtime, failure: Exception | None, folder: Any) -> None:
    """Waits for all ranks of the mesh, and raises on all of them if the first one could not write."""
    mesh = runtime.mesh
    failed = torch.tensor(int(failure is not None), device=runtime.device)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    if failure is not None:
        raise RuntimeError(f"save_safetensors: cannot write {folder}: {failure}") from failure
    if failed.item():
        raise RuntimeError(
            f"save_safetensors: rank {runtime.layout.ranks[0]} could not write {folder}; its error says why"
        )


# ------------------------------------------------------------------ loading


def load_safetensors(
    model: nn.Module, source: str | os.PathLike[str], *, strict: bool = True
) -> IncompatibleKeys:
    """Loads full weights from safetensors files; each rank reads its own slices only.

    Not collective: every rank has to see the files. Parameters on meta get memory, where they live under the policy; values
    are cast to each parameter's dtype. Everything is checked before the first value is written. Buffers that no checkpoint
    holds (``persistent=False``) are left as they are, also on meta.

    Args:
        model: a sharded model, with weights or on meta.
        source: a folder that ``save_safetensors`` or ``save_pretrained`` wrote, an index, or one ``.safetensors`` file.
        strict: whether missing and unexpected names are errors.

    Returns:
        The names that are missing in the files or unexpected there; both empty after a strict load.

    Raises:
        HPCompileError: not a sharded model, ``safetensors`` is not installed, or names differ under ``strict``.
        ValueError: a shape differs, a float would become an integer, or tied names have different values.
        FileNotFoundError: there are no such files.

    Example:
        >>> with torch.device("meta"):  # doctest: +SKIP
        ...     model = hp_compile.shard(LlamaForCausalLM(config), mesh)
        >>> hp_compile.load_safetensors(model, "checkpoint")  # doctest: +SKIP
    """
    runtime = _runtime(model, "load_safetensors")
    runtime.current_plans()
    by_name, first = _states_by_name(model, runtime)
    with Reader(Path(source)) as reader:
        chosen, keys = _match(model, by_name, first, reader)
        if strict and (keys.missing_keys or keys.unexpected_keys):
            lists = (("missing", keys.missing_keys), ("unexpected", keys.unexpected_keys))
            text = "; ".join(f"{what}: {shortened(found)}" for what, found in lists if found)
            raise HPCompileError(
                f"{source}: does not fit {runtime.original_class.__name__}: {text}. Nothing was loaded; strict=False loads "
                "what both have"
            )
        runtime.forget_exact_gradients()
        with torch.no_grad():
            for name, target in chosen.items():
                if isinstance(target, ParamState):
                    _fill(target, read(reader.slices(name), _ranges(target, runtime.layout)))
                else:
                    _fill_buffer(model, name, target, reader.slices(name)[...], runtime.device)
    return keys


def _match(
    model: nn.Module, by_name: dict[str, ParamState], first: dict[str, str], reader: Reader
) -> tuple[dict[str, torch.Tensor | ParamState], IncompatibleKeys]:
    """Which name of the files goes where; checks shapes and dtypes."""
    state = model.state_dict()
    tensors = {n: v for n, v in state.items() if n in by_name or isinstance(v, torch.Tensor)}
    chosen: dict[str, torch.Tensor | ParamState] = {}
    names: dict[str, str] = {}
    for name in tensors:
        if name not in reader.files:
            continue
        target = by_name.get(name, tensors[name])
        _check(name, target, reader)
        if isinstance(target, ParamState):
            known = names.setdefault(target.plan.fqn, name)
            if known != name:
                _check_tied(known, name, target, reader)
                continue
        chosen[name] = target
    missing = [
        name
        for name in tensors
        if (
            name not in reader.files
            if name not in by_name
            else first[by_name[name].plan.fqn] == name and by_name[name].plan.fqn not in names
        )
    ]
    return chosen, IncompatibleKeys(missing, [n for n in reader.files if n not in tensors])


def _check(name: str, target: torch.Tensor | ParamState, reader: Reader) -> None:
    shape = target.plan.shape if isinstance(target, ParamState) else tuple(target.shape)
    held = reader.shape(name)
    if held != tuple(shape):
        raise ValueError(
            f"{name}: {reader.files[name]} has shape {list(held)}, the model {list(shape)}. Nothing was loaded"
        )
    dtype = target.param.dtype if isinstance(target, ParamState) else target.dtype
    kind = reader.slices(name).get_dtype()
    if kind[0] in "FBC" and kind != "BOOL" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"{name}: {reader.files[name]} has dtype {kind}, the model {dtype}. Nothing was loaded"
        )


def _check_tied(known: str, name: str, state: ParamState, reader: Reader) -> None:
    whole = [[(0, size)] for size in state.plan.shape]
    ranges = whole if state.plan.ignored else _ranges(state, state.layout)
    if not torch.equal(read(reader.slices(known), ranges), read(reader.slices(name), ranges)):
        raise ValueError(
            f"{known} and {name} are one parameter of the model, but have different values in {reader.files[name]}. "
            "Nothing was loaded"
        )


def _fill(state: ParamState, rows: torch.Tensor) -> None:
    """Copies this rank's rows into a parameter; gives it memory if it is on meta."""
    param = state.param
    if not param.is_meta:
        (param if state.plan.ignored else local_tensor(param)).copy_(rows)
        return
    rows = rows.to(param.dtype)
    rows = state.place(rows)
    value = rows if state.plan.ignored else state.to_dtensor(rows)
    filled = nn.Parameter(value, param.requires_grad)
    vars(filled).update(vars(param))
    torch.utils.swap_tensors(param, filled)  # an optimizer may hold the parameter already
    state.register(param)
    state.settle()


def _fill_buffer(
    model: nn.Module, name: str, buffer: torch.Tensor, value: torch.Tensor, device: torch.device
) -> None:
    if not buffer.is_meta:
        buffer.copy_(value)
        return
    path, _, own = name.rpartition(".")
    model.get_submodule(path)._buffers[own] = value.to(device, buffer.dtype, copy=True)


def _ranges(state: ParamState, layout: MeshLayout) -> list[list[tuple[int, int]]]:
    """Which rows of each dim this rank holds."""
    plan = state.plan
    return [list(_runs(_rows(plan, layout, dim))) for dim in range(len(plan.shape))]


def _rows(plan: ParamPlan, layout: MeshLayout, dim: int) -> torch.Tensor:
    """Indices along one dim that this rank holds, in order: the dim is cut like a tensor of its own."""
    rows = torch.arange(plan.shape[dim])
    if plan.ignored:
        return rows
    alone = [
        Replicate()
        if shard_dim_of(p) != dim
        else strided_shard(0, split_factor_of(p))
        if split_factor_of(p) > 1
        else Shard(0)
        for p in plan.unsharded_placements
    ]
    rows = take_model_parallel_part(rows, layout, alone)
    if plan.shard_dim == dim:
        rows = take_shard(rows, 0, plan.lengths, plan.shard_index)
    return rows


def _runs(rows: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Runs of consecutive indices as ``(start, stop)``; one empty run if there are none."""
    if rows.numel() == 0:
        yield 0, 0
        return
    breaks = (rows[1:] != rows[:-1] + 1).nonzero().flatten() + 1
    for run in torch.tensor_split(rows, breaks.tolist()):
        yield int(run[0]), int(run[-1]) + 1


# ------------------------------------------------------------------ both


def _runtime(model: nn.Module, what: str) -> Runtime:
    if not is_sharded(model):
        raise HPCompileError(
            f"{what}: expected a model that hp_compile.shard returned, got {type(model).__name__}; for a plain model use "
            "safetensors.torch or save_pretrained and from_pretrained"
        )
    return model._hp_runtime  # type: ignore[return-value]


def _states_by_name(
    model: nn.Module, runtime: Runtime
) -> tuple[dict[str, ParamState], dict[str, str]]:
    """State of every parameter under all its names, and the first name of each that ``state_dict`` has."""
    of = {id(state.param): state for state in runtime.states.values()}
    params = model.named_parameters(remove_duplicate=False)
    by_name = {name: of[id(param)] for name, param in params}
    first: dict[str, str] = {}
    for name, state in by_name.items():
        first.setdefault(state.plan.fqn, name)
    return by_name, first
