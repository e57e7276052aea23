"""Policies: frozen values that say how a model is to be sharded; impossible states cannot be built.

A :class:`Policy` is checked field by field when it is made, so a wrong policy fails where it was
written and not in the middle of a run. Whether it fits a mesh or a model is checked where these are
known (``infer_roles``, ``plan_params``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Placement

from hyper_parallel.errors import MeshError, PolicyError
from hyper_parallel.mesh import ROLE_NAMES, MeshRoles
from hyper_parallel.tensor_parallel import TensorParallelStyle, style_of

__all__ = [
    "CPUOffloadPolicy",
    "FrozenMapping",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Policy",
]


class FrozenMapping(Mapping[str, Any]):
    """A mapping that is a value: hashable, sorted by key, equal to any mapping with equal items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items: tuple[tuple[str, Any], ...] = tuple(sorted(items.items(), key=lambda i: i[0]))

    def __getitem__(self, key: str) -> Any:
        for name, value in self._items:
            if name == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(dict(self._items))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a model is sharded, reduced and compiled.

    A value: hashable and comparable, so it can be part of every cache key. Parameters in
    ``ignored_params`` and functions count by identity.

    Attributes:
        roles: What the mesh dims are for: a mapping from role to a dim name or a tuple of names, or
            a complete ``MeshRoles``. None reads the dim names. See ``hyper_parallel.mesh``.
        enable_param_shard: True shards parameters over the shard dims (an error without any), False
            never does and only reduces gradients, None shards if the mesh has a data dim.
        reshard_after_forward: True frees gathered parameters after forward and gathers them again
            for backward: least memory. False keeps them until backward: less traffic. An int
            reshards to groups of that size. None is True for every unit but the root.
        shard_placement_fn: From a parameter to the ``Shard`` that FSDP applies; None means dim 0.
            ``(Shard(dim), axes)`` limits the cut to some of the shard dims, by mesh dim name.
        mp_policy: Dtypes of parameters, reductions and outputs.
        offload_policy: Where sharded parameters live between steps.
        ignored_params: Parameters, or globs of FQNs, that are left alone entirely.
        min_shard_numel: Parameters with fewer elements are not cut, only reduced.
        tp_plan: Globs of module FQNs to tensor-parallel styles, or ``"auto"`` for the model's own.
            Kept sorted: which pattern applies to a module may not depend on the order given.
        ep_plan: The same for experts.
        loss_parallel: Outputs of the model that tensor parallelism cuts on their last dim, such as the
            logits over a vocabulary, are not gathered but returned as DTensors.
        units: ``"auto"`` (one unit a repeated block), or globs of module FQNs.
        bucket_mb: None gives one bucket a unit; a number merges neighbouring units up to that many
            MB; 0 gives one collective a parameter.
        reduce_op: ``"avg"`` takes the mean over the batch dims, ``"sum"`` the sum.
        sync_weights: Also broadcast weights over the ranks that should hold the same (replicas, and tp or
            ep dims that do not cut a parameter) once, when they are first sharded.
        fallback: What happens to a model that cannot be captured: ``"error"`` or ``"eager"``.
        backend: ``"inductor"``, or ``"aot_eager"`` for the same passes without code generation.
        dynamic: None captures the batch dim as dynamic, False no dim, True every dim.
        zero_level: 1, 2 or 3 when made by :meth:`zero`, else None.

    Raises:
        PolicyError: A field has a wrong type or value; the message names the field.

    Example:
        >>> Policy(reshard_after_forward=True, ignored_params=["*.inv_freq"]).ignored_params
        frozenset({'*.inv_freq'})
    """

    roles: Mapping[str, str | tuple[str, ...]] | MeshRoles | None = None
    enable_param_shard: bool | None = None
    reshard_after_forward: bool | int | None = None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    ignored_params: Iterable[nn.Parameter | str] | None = None
    min_shard_numel: int = 0
    tp_plan: Mapping[str, Any] | str | None = None
    ep_plan: Mapping[str, Any] | str | None = None
    loss_parallel: bool = False
    units: str | tuple[str, ...] = "auto"
    bucket_mb: float | None = None
    reduce_op: str = "avg"
    sync_weights: bool = False
    fallback: str = "error"
    backend: str = "inductor"
    dynamic: bool | None = None
    zero_level: int | None = None

    def __post_init__(self) -> None:
        _freeze(self, "roles", _frozen_roles(self.roles))
        _freeze(self, "ignored_params", _frozen_ignored(self.ignored_params))
        _freeze(self, "tp_plan", _frozen_plan("tp_plan", self.tp_plan))
        _freeze(self, "ep_plan", _frozen_plan("ep_plan", self.ep_plan))
        _freeze(self, "units", _frozen_units(self.units))
        for name in ("enable_param_shard", "dynamic"):
            _check_type(name, getattr(self, name), (bool, type(None)), "True, False or None")
        for name in ("sync_weights", "loss_parallel"):
            _check_type(name, getattr(self, name), (bool,), "True or False")
        _check_reshard(self.reshard_after_forward)
        if self.shard_placement_fn is not None and not callable(self.shard_placement_fn):
            raise _wrong(
                "shard_placement_fn",
                self.shard_placement_fn,
                "a function from a parameter to a Shard, or None",
            )
        _check_mp_policy(self.mp_policy)
        _check_type(
            "offload_policy",
            self.offload_policy,
            (OffloadPolicy,),
            "OffloadPolicy() or CPUOffloadPolicy()",
        )
        if not _is_int(self.min_shard_numel) or self.min_shard_numel < 0:
            raise _wrong("min_shard_numel", self.min_shard_numel, "a number of elements, 0 or more")
        _check_bucket_mb(self.bucket_mb)
        _check_choice("reduce_op", self.reduce_op, ("avg", "sum"))
        _check_choice("fallback", self.fallback, ("error", "eager"))
        _check_choice("backend", self.backend, ("inductor", "aot_eager"))
        _check_zero(self.zero_level, self.reshard_after_forward)

    @classmethod
    def zero(cls, level: int, **changes: Any) -> Policy:
        """Builds the policy of a ZeRO level.

        Level 1 gathers for forward, frees after backward and reduces once, at the last micro step.
        Level 2 gathers once and keeps the parameters until the last micro step's backward ends;
        every micro step reduce-scatters and accumulates shards. Level 3 gathers again for backward
        and reduce-scatters at every micro step.

        Args:
            level: 1, 2 or 3.
            **changes: Any other field.

        Raises:
            PolicyError: No such level, or a field that contradicts it.
        """
        if not _is_int(level) or level not in (1, 2, 3):
            raise PolicyError(f"Policy.zero: the ZeRO levels are 1, 2 and 3, got {level!r}")
        changes.setdefault("reshard_after_forward", level == 3)
        if changes.setdefault("zero_level", level) != level:
            raise PolicyError(
                f"Policy.zero({level}): zero_level={changes['zero_level']!r} contradicts the level"
            )
        return cls(**changes)

    def __hash__(self) -> int:
        # OffloadPolicy is a mutable dataclass in torch and has no hash of its own.
        return hash(
            tuple(
                _offload_key(self.offload_policy)
                if spec.name == "offload_policy"
                else getattr(self, spec.name)
                for spec in fields(self)
            )
        )

    def program_key(self) -> tuple[tuple[str, Any], ...]:
        """Returns the fields that change the program, as plain text and numbers.

        It is stable over processes and machines. Roles, ``enable_param_shard``,
        ``min_shard_numel``, ``shard_placement_fn`` and ``ignored_params`` are left out because all
        that they do shows in the layout and in every ``ParamPlan``; backend and fall-back because
        they only run it.
        """
        return (
            ("bucket_mb", self.bucket_mb),
            ("dynamic", self.dynamic),
            ("ep_plan", _stable(self.ep_plan)),
            ("loss_parallel", self.loss_parallel),
            ("mp_policy", _stable(vars(self.mp_policy))),
            ("offload_policy", _offload_key(self.offload_policy)),
            ("reduce_op", self.reduce_op),
            ("reshard_after_forward", self.reshard_after_forward),
            ("tp_plan", _stable(self.tp_plan)),
            ("units", self.units),
        )


def _freeze(policy: Policy, name: str, value: object) -> None:
    object.__setattr__(policy, name, value)


def _wrong(name: str, got: object, expected: str) -> PolicyError:
    return PolicyError(
        f"Policy.{name}: expected {expected}, got {got!r} of type {type(got).__name__}"
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_type(name: str, value: object, types: tuple[type, ...], expected: str) -> None:
    if not isinstance(value, types):
        raise _wrong(name, value, expected)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise _wrong(name, value, " or ".join(repr(choice) for choice in choices))


def _check_reshard(value: object) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int) or value < 1:
        raise _wrong(
            "reshard_after_forward",
            value,
            "True, False, None, or the size (1 or more) of the group to reshard to",
        )


def _check_mp_policy(value: object) -> None:
    _check_type("mp_policy", value, (MixedPrecisionPolicy,), "a MixedPrecisionPolicy")
    assert isinstance(value, MixedPrecisionPolicy)
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(value, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise _wrong(f"mp_policy.{name}", dtype, "a floating-point torch.dtype or None")
    _check_type(
        "mp_policy.cast_forward_inputs", value.cast_forward_inputs, (bool,), "True or False"
    )


def _check_bucket_mb(value: object) -> None:
    if value is None:
        return
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or math.isnan(value)
        or value < 0
    ):
        raise _wrong("bucket_mb", value, "None or a number of MB, 0 or more")


def _check_zero(level: object, reshard: object) -> None:
    if level is None:
        return
    if not _is_int(level) or level not in (1, 2, 3):
        raise _wrong("zero_level", level, "1, 2, 3 or None")
    keeps = reshard is False
    if keeps != (level != 3):
        want = "True (or a group size)" if level == 3 else "False"
        raise PolicyError(
            f"Policy.reshard_after_forward: ZeRO-{level} needs {want}, got {reshard!r}; build the "
            f"policy with Policy.zero({level}) or leave zero_level out"
        )


def _frozen_roles(roles: object) -> FrozenMapping | MeshRoles | None:
    if roles is None or isinstance(roles, MeshRoles | FrozenMapping):
        return roles
    if not isinstance(roles, Mapping):
        raise _wrong("roles", roles, "a mapping from role to dim name(s), a MeshRoles, or None")
    unknown = [role for role in roles if role not in ROLE_NAMES]
    if unknown:
        raise PolicyError(
            f"Policy.roles: unknown role {unknown[0]!r}; the roles are {', '.join(ROLE_NAMES)}"
        )
    try:
        checked = MeshRoles(**roles)
    except MeshError as error:
        raise PolicyError(f"Policy.roles: {error}") from error
    return FrozenMapping({role: getattr(checked, role) for role in roles})


def _frozen_ignored(ignored: object) -> frozenset[Any]:
    if ignored is None:
        return frozenset()
    expected = "parameters or FQN globs, as a list or set"
    if isinstance(ignored, str):
        return frozenset({ignored})
    if not isinstance(ignored, Iterable) or isinstance(ignored, torch.Tensor | Mapping):
        raise _wrong("ignored_params", ignored, expected)
    items = list(ignored)
    for item in items:
        if not isinstance(item, str | nn.Parameter):
            raise _wrong("ignored_params", item, expected)
    return frozenset(items)


def _frozen_plan(name: str, plan: object) -> FrozenMapping | str | None:
    if plan is None or plan == "auto" or isinstance(plan, FrozenMapping):
        return plan  # type: ignore[return-value]
    if not isinstance(plan, Mapping):
        raise _wrong(name, plan, "a mapping from module FQN globs to styles, 'auto' or None")
    for pattern in plan:
        if not isinstance(pattern, str) or not pattern:
            raise _wrong(name, pattern, "FQN globs as keys")
    if (
        name == "tp_plan"
    ):  # strings stay as they were given; objects become values that can be compared
        styles = {pattern: style_of(pattern, style) for pattern, style in plan.items()}
        plan = {p: s if isinstance(s, str) else styles[p] for p, s in plan.items()}
    for pattern, style in plan.items():
        try:
            hash(style)
        except TypeError:
            raise _wrong(f"{name}[{pattern!r}]", style, "a style that can be hashed") from None
    return FrozenMapping(plan)


def _frozen_units(units: object) -> str | tuple[str, ...]:
    if units == "auto":
        return "auto"
    if isinstance(units, str):
        return (units,)
    if not isinstance(units, Iterable) or isinstance(units, torch.Tensor):
        raise _wrong("units", units, "'auto' or globs of module FQNs")
    globs = tuple(units)
    if not globs or any(not isinstance(glob, str) for glob in globs):
        raise _wrong("units", units, "'auto' or globs of module FQNs")
    return globs


def _offload_key(policy: OffloadPolicy) -> tuple[str, Any]:
    return (type(policy).__name__, _stable(vars(policy)))


def _stable(value: Any) -> Any:
    """Turns a value into text and tuples that are equal in every process."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return tuple((str(key), _stable(item)) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_stable(item) for item in value)
    if isinstance(value, torch.dtype | TensorParallelStyle):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    state = getattr(value, "__dict__", None)
    if state is None or isinstance(value, Placement):  # its repr says everything
        return repr(value)
    return (type(value).__name__, _stable(state))
