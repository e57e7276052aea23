"""Tensor-parallel plans: from globs and styles to the placement of each parameter and the layouts at module boundaries.

Styles are what users know: the strings of Hugging Face's ``tp_plan`` and the objects of
``torch.distributed.tensor.parallel``. What a style means for a parameter depends on the module:

=================  ======================  =====================  ===================================================
style              ``Linear``              ``Embedding``          bare parameter (``[..., out, in]``)
=================  ======================  =====================  ===================================================
``colwise``        weight 0, bias 0        weight 1               dim -2
``rowwise``        weight 1, bias whole    weight 0 (vocabulary)  dim -1
``packed_colwise`` weight 0, bias 0, in    not allowed            dim -2, in equal blocks
                   equal blocks (2)
=================  ======================  =====================  ===================================================

Hugging Face's ``Conv1D`` holds its weight transposed, so its dims are swapped. Where a style only says how a module's
output is to be gathered or its input to be split, nothing is needed here: layouts are followed through the graph, and a
value is gathered where somebody reads it whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from hyper_parallel.errors import PolicyError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.torch_compat.distributed import shard_dim_of, split_factor_of, strided_shard

__all__ = [
    "ModuleBoundary",
    "TensorParallelPlan",
    "TensorParallelStyle",
    "resolve_tp_plan",
    "style_of",
]


@dataclass(frozen=True, kw_only=True)
class TensorParallelStyle:
    """What a tensor-parallel plan asks for at one module (or bare parameter); a value.

    Attributes:
        name: as in messages.
        weight: ``colwise``, ``rowwise``, ``packed_colwise``, or empty for parameters that stay whole.
        blocks: equal blocks of a packed weight, e.g. 2 for gate and up in one matrix, 3 for query, key and value.
        enters: placement of activations that enter; None leaves them as they come.
        given: what an entering activation must be for ``enters`` to apply; None for anything.
        leaves: placement of activations that leave; None leaves them as they are.
        keeps_output: outputs of the whole model that are cut on their last dim stay cut.
    """

    name: str
    weight: str = ""
    blocks: int = 1
    enters: Placement | None = None
    given: Placement | None = None
    leaves: Placement | None = None
    keeps_output: bool = False

    def __str__(self) -> str:
        parts = [self.name]
        parts += [
            f"{self.weight}" if self.blocks == 1 else f"{self.weight} in {self.blocks} blocks"
        ]
        if self.enters is not None:
            parts.append(f"{'' if self.given is None else f'{self.given} '}in as {self.enters}")
        if self.leaves is not None:
            parts.append(f"out as {self.leaves}")
        if self.keeps_output:
            parts.append("output stays cut")
        return ", ".join(part for part in parts if part)


_STYLES: Mapping[str, TensorParallelStyle] = {
    name: TensorParallelStyle(name=name, **fields)
    for name, fields in dict[str, dict[str, Any]](
        {
            "colwise": {"weight": "colwise"},
            "colwise_gather_output": {"weight": "colwise"},
            "colwise_rep": {"weight": "colwise"},
            "rowwise": {"weight": "rowwise"},
            "rowwise_split_input": {"weight": "rowwise"},
            "rowwise_rep": {"weight": "rowwise"},
            "embedding_rowwise": {"weight": "rowwise"},
            "embedding_colwise": {"weight": "colwise"},
            "packed_colwise": {"weight": "packed_colwise", "blocks": 2},
            "sequence_parallel": {"enters": Shard(1)},
            "replicate": {},
            "replicated_with_grad_allreduce": {},
            "all_reduce": {},
        }
    ).items()
}

#: Strings that ``transformers`` defines and that are refused, with the reason.
_REFUSED: Mapping[str, str] = {
    "packed_rowwise": "a weight packed along its input features has no placement here",
    "mla_kv_a_proj": "latent attention's compressed projection needs its own gradient rule",
    "local_params": "a module that runs on its own parts is no part of tp_plan",
}
#: Strings whose sums leave cut along the sequence where another string of the plan is ``sequence_parallel``.
_SUMMED = frozenset({"rowwise", "rowwise_split_input", "embedding_rowwise"})
_TORCH_STYLES = frozenset(
    {
        "ColwiseParallel",
        "RowwiseParallel",
        "SequenceParallel",
        "PrepareModuleInput",
        "PrepareModuleOutput",
    }
)
_EXPERTS = ("moe_", "ep_", "grouped_")


@dataclass(frozen=True)
class ModuleBoundary:
    """Placements that a plan asks for where activations enter and leave a module.

    Attributes:
        enters: of activations that enter; None leaves them as they come.
        given: what they must be for ``enters`` to apply; None for anything.
        leaves: of activations that leave; None leaves them as they are.
        least_rank: values with fewer dims are left alone.
    """

    enters: Placement | None = None
    given: Placement | None = None
    leaves: Placement | None = None
    least_rank: int = 0


@dataclass(frozen=True)
class TensorParallelPlan:
    """A plan as it applies to one model on one mesh.

    Attributes:
        axis: the mesh dim.
        size: its ranks.
        placements: placement of each parameter that is cut, by first FQN.
        boundaries: by module FQN.
        keep_outputs: outputs of the model that are cut on their last dim stay cut.
        notes: what was decided differently from the plan, one sentence each.
    """

    axis: str
    size: int
    placements: Mapping[str, Placement] = field(default_factory=dict)
    boundaries: Mapping[str, ModuleBoundary] = field(default_factory=dict)
    keep_outputs: bool = False
    notes: tuple[str, ...] = ()

    @property
    def by_axis(self) -> dict[str, dict[str, Placement]]:
        """Placements as ``plan_params`` takes them."""
        return {fqn: {self.axis: placement} for fqn, placement in self.placements.items()}


def style_of(pattern: str, style: object) -> TensorParallelStyle:
    """A style as a value.

    Args:
        pattern: the glob that it was given for, for messages.
        style: a string, an object of ``torch.distributed.tensor.parallel``, or a :class:`TensorParallelStyle`.

    Raises:
        PolicyError: no known style.
    """
    where = f"Policy.tp_plan[{pattern!r}]"
    if isinstance(style, TensorParallelStyle):
        return style
    if isinstance(style, str):
        if style in _STYLES:
            return _STYLES[style]
        reason = _REFUSED.get(style)
        if style.startswith(_EXPERTS):
            reason = "experts are no part of tp_plan"
        if reason is not None:
            raise PolicyError(
                f"{where}: the style {style!r} is not supported: {reason}; use one of {sorted(_STYLES)}, or leave "
                "the module out of the plan"
            )
        near = difflib.get_close_matches(style, [*_STYLES, *_REFUSED], 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        if style in _TORCH_STYLES:
            meant = (
                f"; pass the object {style}() of torch.distributed.tensor.parallel, or a string."
            )
        raise PolicyError(
            f"{where}: unknown style {style!r}"
            + meant
            + f" Known styles: {', '.join(sorted(_STYLES))}"
        )
    if isinstance(style, ParallelStyle):
        return _torch_style(where, style)
    if isinstance(style, type) and issubclass(style, ParallelStyle | TensorParallelStyle):
        raise PolicyError(
            f"{where}: got the class {style.__name__}; pass an object of it, {style.__name__}(...)"
        )
    raise PolicyError(
        f"{where}: expected a style string such as 'colwise', or an object of torch.distributed.tensor.parallel, got "
        f"{type(style).__name__} {style!r}"
    )


def _torch_style(where: str, style: ParallelStyle) -> TensorParallelStyle:
    name = type(style).__name__
    if isinstance(style, ColwiseParallel):
        leaves = _single(style.output_layouts)
        last = shard_dim_of(leaves) == -1 if leaves is not None else True
        whole = isinstance(leaves, Replicate)
        return TensorParallelStyle(
            name=name,
            weight="colwise",
            leaves=None if last or whole else leaves,
            keeps_output=last and not style.use_local_output,
        )
    if isinstance(style, RowwiseParallel):
        leaves = _single(style.output_layouts)
        return TensorParallelStyle(
            name=name, weight="rowwise", leaves=None if isinstance(leaves, Replicate) else leaves
        )
    if isinstance(style, SequenceParallel):
        return TensorParallelStyle(name=name, enters=_single(style.sequence_sharding))
    enters = given = leaves = None
    inner = getattr(style, "prepare_module_input", style)
    if isinstance(inner, PrepareModuleInput):
        given, enters = _changed(
            where, name, inner.input_layouts or (), inner.desired_input_layouts or ()
        )
        if inner.input_kwarg_layouts and enters is None:
            kwargs = inner.desired_input_kwarg_layouts
            given, enters = _changed(
                where, name, tuple(inner.input_kwarg_layouts.values()), tuple(kwargs.values())
            )
    outer = getattr(style, "prepare_module_output", style)
    if isinstance(outer, PrepareModuleOutput):
        _, leaves = _changed(where, name, outer.output_layouts, outer.desired_output_layouts)
    if inner is style and outer is style and enters is None and leaves is None:
        known = isinstance(style, PrepareModuleInput | PrepareModuleOutput)
        if not known:
            raise PolicyError(
                f"{where}: the style {name} is not supported; use ColwiseParallel, RowwiseParallel, SequenceParallel, "
                "PrepareModuleInput or PrepareModuleOutput"
            )
    return TensorParallelStyle(name=name, enters=enters, given=given, leaves=leaves)


def _single(layouts: Any) -> Placement | None:
    placement = layouts[0] if isinstance(layouts, tuple | list) else layouts
    return placement  # type: ignore[no-any-return]


def _changed(
    where: str, name: str, given: Sequence[Any], desired: Sequence[Any]
) -> tuple[Placement | None, Placement | None]:
    """The one change of layout that a list of layouts asks for."""
    pairs = {
        (_single(g), _single(d))
        for g, d in zip(given, desired, strict=True)
        if d is not None and g != d
    }
    if len(pairs) > 1:
        raise PolicyError(
            f"{where}: {name} asks for different layouts of different inputs ({sorted(map(str, pairs))}); a plan can change "
            "one kind of layout a module"
        )
    return next(iter(pairs), (None, None))


# ------------------------------------------------------------------ from globs to parameters


def resolve_tp_plan(
    model: nn.Module, plan: Mapping[str, Any] | str | None, layout: MeshLayout
) -> TensorParallelPlan | None:
    """Applies ``Policy.tp_plan`` to a model; None where there is no plan.

    An exact FQN wins over a glob, and a longer glob over a shorter one. A glob that matches no module may match parameters.

    Args:
        model: the model; its parameters may be on meta or sharded.
        plan: globs of module (or parameter) FQNs to styles, or ``"auto"``.
        layout: the mesh.

    Raises:
        PolicyError: no tp dim in the mesh, a glob that matches nothing, a style that does not fit, or ``"auto"`` for a
            model that has no plan of its own.
    """
    if plan is None:
        return None
    axes = layout.roles.tp
    if len(axes) != 1:
        raise PolicyError(
            f"Policy.tp_plan: the mesh ({layout.describe()}) has {'no dim' if not axes else 'several dims'} with role tp; "
            "name one dim 'tp', or pass roles={'tp': ...}, or leave tp_plan None"
        )
    auto = plan == "auto"
    patterns = _own_plan(model) if isinstance(plan, str) else plan
    styles = {pattern: style_of(pattern, style) for pattern, style in patterns.items()}
    modules = {name: m for name, m in model.named_modules(remove_duplicate=False) if name}
    params = dict(model.named_parameters(remove_duplicate=False))
    chosen, rest = _match(styles, modules)
    bare, unused = _match({p: styles[p] for p in rest}, params)
    chosen.update(bare)
    if unused and (not auto or len(unused) == len(styles)):
        raise PolicyError(_no_match(unused[0], [*modules, *params]))
    size = layout.size(axes[0])
    notes: list[str] = []
    if auto:
        _replicate_few_heads(model, chosen, size, notes)
    sequence = next((s.enters for s in styles.values() if s.name == "sequence_parallel"), None)
    first = _first_names(model)
    placements: dict[str, tuple[str, Placement]] = {}
    boundaries = {}
    for name, (pattern, style) in chosen.items():
        where = f"Policy.tp_plan[{pattern!r}]"
        if name in params:
            cut = {name: _bare_placement(where, name, params[name], style)}
        else:
            cut = _module_placements(where, name, modules[name], style)
            if sequence is not None and style.name in _SUMMED:
                boundaries[name] = ModuleBoundary(leaves=sequence, least_rank=3)
            elif style.enters is not None or style.leaves is not None:
                boundaries[name] = ModuleBoundary(style.enters, style.given, style.leaves)
        for fqn, placement in cut.items():
            _check_blocks(where, fqn, params[fqn], placement, size)
            owner = first.get(fqn, fqn)
            known = placements.setdefault(owner, (name, placement))
            if known[1] != placement:
                raise PolicyError(
                    f"Policy.tp_plan: {owner} is one parameter under several names, and the plan cuts it as {known[1]} at "
                    f"{known[0]} and as {placement} at {name}; use the same cut at both"
                )
    final = {fqn: p for fqn, (_, p) in placements.items() if not isinstance(p, Replicate)}
    keep = any(style.keeps_output for _, style in chosen.values())
    return TensorParallelPlan(axes[0], size, final, boundaries, keep, tuple(notes))


def _check_blocks(
    where: str, fqn: str, param: nn.Parameter, placement: Placement, size: int
) -> None:
    """A packed dim has to be so many blocks, each of them a multiple of the ranks."""
    dim, blocks = shard_dim_of(placement), split_factor_of(placement)
    if dim is not None and blocks > 1 and param.shape[dim] % (blocks * size):
        raise PolicyError(
            f"{where}: {fqn} of shape {tuple(param.shape)} is packed on dim {dim}, whose {param.shape[dim]} rows are no "
            f"{blocks} equal blocks that {size} ranks can cut; change blocks, or use 'replicate'"
        )


def _own_plan(model: nn.Module) -> Mapping[str, Any]:
    found = getattr(model, "_tp_plan", None) or getattr(model, "tp_plan", None)
    if not found:
        config = getattr(model, "config", None)
        base = getattr(config, "base_model_tp_plan", None)
        prefix = getattr(model, "base_model_prefix", "")
        inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        found = {inside + key: style for key, style in (base or {}).items()}
    if not found:
        raise PolicyError(
            f"Policy.tp_plan: 'auto' takes the model's own plan, but {type(model).__name__} has none (no _tp_plan, no "
            "config.base_model_tp_plan); pass a mapping such as {'*.q_proj': 'colwise', '*.o_proj': 'rowwise'}"
        )
    return dict(found)


def _match(
    styles: Mapping[str, TensorParallelStyle], names: Iterable[str]
) -> tuple[dict[str, tuple[str, TensorParallelStyle]], list[str]]:
    """The most specific style of every name, and the patterns that match nothing."""
    chosen: dict[str, tuple[str, TensorParallelStyle]] = {}
    used = set()
    for name in names:
        hits = [p for p in styles if p == name or fnmatchcase(name, p)]
        used.update(hits)
        if hits:
            best = max(hits, key=lambda p: (p == name, len(p)))
            chosen[name] = (best, styles[best])
    return chosen, [p for p in styles if p not in used]


def _no_match(pattern: str, names: Sequence[str]) -> str:
    last = pattern.rpartition(".")[2]
    near = difflib.get_close_matches(pattern, names, 3, 0.5)
    near = near or [n for n in names if difflib.get_close_matches(last, [n.rpartition(".")[2]], 1)]
    # Without one near it: names that a plan would use, one for each kind of module.
    kinds = {n.rpartition(".")[2]: n for n in reversed(names) if n.endswith(".weight")}
    shown = near[:3] or [n.removesuffix(".weight") for n in names if n in kinds.values()][:6]
    shown = shown or list(names)[:6]
    return (
        f"Policy.tp_plan: {pattern!r} matches no module or parameter; "
        f"{'near it are' if near else 'names of this model are'} {', '.join(shown) or '(none)'}"
    )


def _first_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def _replicate_few_heads(
    model: nn.Module,
    chosen: dict[str, tuple[str, TensorParallelStyle]],
    size: int,
    notes: list[str],
) -> None:
    """Key and value projections with fewer heads than ranks stay whole: a head cannot be cut."""
    config: Any = getattr(model, "config", None)
    heads = getattr(config, "num_key_value_heads", None)
    if not isinstance(heads, int) or heads % size == 0:
        return
    whole = _STYLES["replicate"]
    found = []
    for name, (pattern, style) in list(chosen.items()):
        if style.weight == "colwise" and name.rpartition(".")[2] in ("k_proj", "v_proj"):
            chosen[name] = (pattern, whole)
            found.append(name)
    if found:
        notes.append(
            f"{found[0]} and {len(found) - 1} more key and value projections stay whole: {heads} heads do not divide over "
            f"{size} ranks"
        )


def _module_placements(
    where: str, fqn: str, module: nn.Module, style: TensorParallelStyle
) -> dict[str, Placement]:
    own = {name: p for name, p in module.named_parameters(recurse=False)}
    if not style.weight:
        return {f"{fqn}.{name}": Replicate() for name in own}
    weight = own.get("weight")
    if weight is None or weight.dim() != 2:
        what = (
            "no weight of its own" if weight is None else f"a weight of shape {tuple(weight.shape)}"
        )
        raise PolicyError(
            f"{where}: the style {style.name!r} cuts a matrix, but {fqn} ({type(module).__name__}) has {what}; name the "
            "Linear or Embedding inside it, or the parameter itself"
        )
    embedding = isinstance(module, nn.Embedding)
    if embedding and style.weight == "packed_colwise":
        raise PolicyError(
            f"{where}: {fqn} is an embedding, which has no packed weight; use 'embedding_rowwise'"
        )
    out = 1 if embedding or type(module).__name__ == "Conv1D" else 0
    dim = 1 - out if style.weight == "rowwise" else out
    cut = {f"{fqn}.weight": _cut(dim, style)}
    for name, param in own.items():
        if name == "weight":
            continue
        along = style.weight != "rowwise" and param.dim() == 1 and not embedding
        cut[f"{fqn}.{name}"] = _cut(0, style) if along else Replicate()
    return cut


def _bare_placement(
    where: str, fqn: str, param: nn.Parameter, style: TensorParallelStyle
) -> Placement:
    if not style.weight:
        return Replicate()
    back = 1 if style.weight == "rowwise" or param.dim() == 1 else 2
    if param.dim() < back:
        raise PolicyError(
            f"{where}: the style {style.name!r} cuts dim -{back}, but {fqn} has shape {tuple(param.shape)}"
        )
    return _cut(param.dim() - back, style)


def _cut(dim: int, style: TensorParallelStyle) -> Placement:
    return strided_shard(dim, style.blocks) if style.blocks > 1 else Shard(dim)


def known_styles() -> Iterable[str]:
    """The style strings that a plan may use."""
    return tuple(_STYLES)
