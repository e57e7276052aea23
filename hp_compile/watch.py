"""What happened to a sharded model between two calls: frozen, cast, moved, changed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from torch import nn

from hp_compile.check import names
from hp_compile.state import ParamState
from hyper_parallel.errors import PlacementError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import replan_param


class Change(Enum):
    """What a change of the model asks for.

    Attributes:
        PLANS: a parameter was frozen or unfrozen; programs are kept by what is trained, so old ones stay good.
        PROGRAMS: a dtype or a module changed; nothing that was compiled fits any more.
    """

    PLANS = auto()
    PROGRAMS = auto()


class ModelWatch:
    """Compares a model with what it was at the last call.

    Args:
        module: the sharded module.
        layout: the mesh as a value.
        states: state of every parameter; their plans are kept up to date.

    Attributes:
        modules: all modules, as they were at the last call.
        trainable: for every parameter, whether it was trained then.
        ready: ``check_ready`` has passed since the last change.
    """

    def __init__(
        self, module: nn.Module, layout: MeshLayout, states: Mapping[str, ParamState]
    ) -> None:
        self._module = module
        self._layout = layout
        self._states = states
        self.modules = tuple(module.modules())
        self._facts: list[Any] = []
        self.trainable: tuple[bool, ...] = ()
        self.ready = False

    def look(self) -> Change | None:
        """Looks at the parameters and modules; ``None`` when programs and plans are as they should be.

        Raises:
            PlacementError: parameters were added, removed or replaced.
        """
        modules = tuple(self._module.modules())
        params = [state.param for state in self._states.values()]
        facts = [(id(p), p.requires_grad, p.dtype, p.device) for p in params]
        if len(modules) == len(self.modules) and all(map(_same, modules, self.modules)):
            if facts == self._facts:
                return None
            change: Change = Change.PLANS
        else:
            change = Change.PROGRAMS
        self._check_names()
        self.ready = False
        for state, param in zip(self._states.values(), params, strict=True):
            if param.dtype != state.plan.dtype:
                change = Change.PROGRAMS
            state.plan = replan_param(
                state.plan, self._layout, requires_grad=param.requires_grad, dtype=param.dtype
            )
        self.modules, self._facts = modules, facts
        self.trainable = tuple(p.requires_grad for p in params)
        return change

    def _check_names(self) -> None:
        held = dict(self._module.named_parameters())
        known = {fqn: state.param for fqn, state in self._states.items()}
        wrong = [f for f in {**known, **held} if held.get(f) is not known.get(f)]
        if wrong:
            raise PlacementError(
                f"{names(wrong)}: added, removed or replaced after shard, which the sharded model does not know; change the "
                "model before shard (freezing, unfreezing and load_state_dict are fine afterwards)"
            )
        for state in self._states.values():
            state.local()

    def check_ready(self) -> None:
        """Checks that programs can run on what the model holds; planning needs less.

        Raises:
            PlacementError: a tensor is on meta, or a shard is not where shards of this model live.
        """
        states = self._states.values()
        meta = [s.plan.fqn for s in states if s.param.is_meta]
        meta += [name for name, buffer in self._module.named_buffers() if buffer.is_meta]
        if meta:
            raise PlacementError(
                f"{names(meta)}: still on the meta device; call to_empty(device=...) and initialise, or load a state dict "
                "with assign=True, before the first call"
            )
        home = [s for s in states if not s.plan.ignored]
        moved = [s for s in home if s.local().device != s.home.storage]
        if moved:
            raise PlacementError(
                f"{names([s.plan.fqn for s in moved])}: on {moved[0].local().device}, but the shards of this model live on "
                f"{moved[0].home.storage}; move the model back, or use Policy(offload_policy=CPUOffloadPolicy()) to keep "
                "shards on the CPU"
            )
        self.ready = True


def _same(a: object, b: object) -> bool:
    return a is b
