"""The runtime of a sharded module: chooses programs, feeds them local tensors, hands gradients to autograd."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hp_compile import build, fallback, reduction
from hp_compile.agree import Board, compare_inputs, compare_ranks
from hp_compile.attributes import module_state
from hp_compile.autograd import Call, Like, alias_of_output, match_layout, same_memory
from hp_compile.cache import ProgramCache
from hp_compile.convert import sync_replicas
from hp_compile.guard import ReplicaGuard
from hp_compile.program import Program, Sizes, sizes_of
from hp_compile.signature import Signature, flatten_call
from hp_compile.state import ParamState
from hp_compile.units import Units
from hp_compile.watch import Change, ModelWatch
from hyper_parallel.errors import CaptureError
from hyper_parallel.fully_shard import HSDPParam
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import Policy
from hyper_parallel.tensor_parallel import TensorParallelPlan
from hyper_parallel.torch_compat.distributed import versions
from passes.base import (
    BufferInput,
    BufferUpdate,
    InputGrad,
    InputUpdate,
    ParamGrad,
    ParamInput,
    SavedInput,
    SavedOutput,
    UserOutput,
    inputs,
    output_node,
)

log = logging.getLogger("hp_compile")


@dataclass
class Flags:
    """What the setters of ``ShardedModule`` change."""

    gradient_sync: bool = True
    all_reduce: bool = True
    last_backward: bool = True
    reshard_after_backward: bool = True
    reshard: dict[str, bool | int] = field(default_factory=dict)
    reduce_op: str = "avg"
    divide_factor: float | None = None


class Runtime:
    """Everything that ``shard`` attaches to a module.

    Args:
        module: the sharded module.
        original_class: its class before ``shard``.
        mesh: the user's mesh.
        layout: the mesh as a value.
        policy: the policy.
        plans: plan of every parameter.
        units: units of the module.
        states: runtime state of every parameter, in registration order.
        device: device of this rank on the mesh.
        board: where the ranks of this model compare notes.
        tensor_parallel: the tensor-parallel plan, if there is one.
    """

    def __init__(
        self,
        module: nn.Module,
        original_class: type,
        mesh: DeviceMesh,
        layout: MeshLayout,
        policy: Policy,
        plans: Mapping[str, ParamPlan],
        units: Units,
        states: Mapping[str, ParamState],
        device: torch.device,
        board: Board,
        tensor_parallel: TensorParallelPlan | None = None,
    ) -> None:
        self.module = module
        self.original_class = original_class
        self.mesh = mesh
        self.layout = layout
        self.policy = policy
        self.plans = plans
        self.units = units
        self.states = states
        self.device = device
        self.tensor_parallel = tensor_parallel
        self.flags = Flags(reshard=build.reshard_map(policy, units), reduce_op=policy.reduce_op)
        self._cache = ProgramCache()
        self.unsharded: dict[str, torch.Tensor] | None = None
        self._versions: tuple[tuple[int, int], ...] = ()
        self.checked = False
        self.reductions: dict[Any, Any] = {}
        self.board = board
        self.weights_synced = not policy.sync_weights
        self._watch = ModelWatch(module, layout, states)
        self._guard = ReplicaGuard(self)
        self._hsdp_params: dict[str, HSDPParam] = {}

    @property
    def programs(self) -> Mapping[Any, Sequence[Program]]:
        """Programs captured so far, by everything that selects them but sizes."""
        return self._cache.by_key

    # -------------------------------------------------------------- choosing a program

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the user's forward as a program."""
        with outside_inference_mode():  # what is kept for later calls must serve training too
            self._prepare()
            self._keep_or_drop_weights()
            try:
                program, given, tensors = self._program_of_call(args, kwargs)
            except CaptureError as error:
                if self.policy.fallback != "eager":
                    raise
                return fallback.run_eagerly(self, error)(*args, **kwargs)
            if not self.checked:
                self._compare_ranks(program, tensors)
            if not self.weights_synced:
                self.sync_weights()
            self._guard.before_forward()
            result = self._run(program, tensors)
            program.return_updates(given, tensors)
        return result

    def _program_of_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Program, list[torch.Tensor], list[torch.Tensor]]:
        """The program, the caller's flat tensors, and the same on the mesh's device and contiguous."""
        try:
            signature, given = flatten_call(args, kwargs)
            tensors = [t.to(self.device).contiguous() for t in given]
            return self.program(signature, tensors), given, tensors
        except Exception as error:
            falls_back = isinstance(error, CaptureError) and self.policy.fallback == "eager"
            if not self.checked and not falls_back:
                self.board.post_failure("program", error)
            raise

    def program(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> Program:
        """The program for a call, captured now if there is none that accepts its sizes."""
        trainable = self._watch.trainable
        grad = torch.is_grad_enabled() and (any(trainable) or any(t.requires_grad for t in tensors))
        mode = (
            grad,
            autocast_state(self.device),
            trainable if grad else (),
            tuple(self.flags.reshard.items()),
            self.unsharded is None,
        )

        def capture(all_dims: bool) -> Program:
            return build.build_program(
                self.module,
                signature,
                tensors,
                original_class=self.original_class,
                layout=self.layout,
                policy=self.policy,
                plans=self.plans,
                units=self.units,
                reshard=self.flags.reshard,
                device=self.device,
                grad=grad,
                all_dims=all_dims,
                gathered=self.unsharded is None,
                tensor_parallel=self.tensor_parallel,
            )

        state = module_state(self._watch.modules)
        return self._cache.get(signature, tensors, mode, state, capture)

    # -------------------------------------------------------------- changes from outside

    def current_plans(self) -> Mapping[str, ParamPlan]:
        """Plans of the parameters as they are now: what happened to the model since the last call is taken over.

        Raises:
            PlacementError: parameters were added, removed or replaced.
        """
        change = self._watch.look()
        if change:
            self.plans = {fqn: state.plan for fqn, state in self.states.items()}
        if change is Change.PROGRAMS:
            self._cache.clear()
            self.reductions.clear()
            self.reshard()
            self.forget_exact_gradients()
        return self.plans

    def _prepare(self) -> None:
        """Before anything runs: follows the model, and checks that its weights are there."""
        self.current_plans()
        if not self._watch.ready:
            self._watch.check_ready()

    def forget_exact_gradients(self) -> None:
        """Lets autograd's nodes and weak references go, which belong to the old dtype and forbid swapping a parameter."""
        for state in self.states.values():
            state.exact = None

    def after_apply(self) -> None:
        """Makes one parameter of what ``to`` or ``to_empty`` may have untied, and gives shards their padding back."""
        for state in self.states.values():
            state.register(state.param)
            state.settle()

    def sync_weights(self) -> None:
        """Broadcasts shards over the replicas, once, as soon as all of them have values."""
        if self.weights_synced or any(s.param.is_meta for s in self.states.values()):
            return
        sync_replicas(self.mesh, self.layout, self.states)
        self.weights_synced = True

    def check_replicas(self) -> None:
        """Compares parameters, and gradients in ``.grad``, between the ranks that hold copies of them."""
        self._prepare()
        self._guard.check()

    def hsdp_params(self) -> list[HSDPParam]:
        """The parameters as ``HSDPParam`` objects; the same object as long as the model holds the same parameter."""
        for fqn, state in self.states.items():
            known = self._hsdp_params.get(fqn)
            if state.plan.ignored or (known is not None and known.sharded_param is state.param):
                continue
            self._hsdp_params[fqn] = HSDPParam(
                state.param,
                state.plan,
                self.mesh,
                self.layout,
                self.policy.mp_policy,
                offload_policy=self.policy.offload_policy,
                device=self.device,
                already_sharded=True,
            )
        return [self._hsdp_params[fqn] for fqn in self.states if fqn in self._hsdp_params]

    # -------------------------------------------------------------- weights held between micro-batches

    def unshard(self) -> None:
        """Gathers every parameter and keeps it until ``reshard`` or the last backward of the step."""
        self._prepare()
        if self.unsharded is None:
            self.unsharded = build.gather_program(self)()
            self._versions = self._shard_versions()

    def reshard(self) -> None:
        """Frees what ``unshard`` gathered."""
        self.unsharded = None

    def _keep_or_drop_weights(self) -> None:
        if self.unsharded is not None and self._versions != self._shard_versions():
            self.reshard()  # the optimizer has changed the shards since
        flags = self.flags
        keeps = not flags.reshard_after_backward or self.policy.zero_level == 2
        if torch.is_grad_enabled() and keeps and not flags.last_backward:
            self.unshard()

    def _shard_versions(self) -> tuple[tuple[int, int], ...]:
        return tuple(versions(s.param) for s in self.states.values() if not s.plan.ignored)

    def _compare_ranks(self, program: Program, tensors: Sequence[torch.Tensor]) -> None:
        compare_ranks(self, program)
        compare_inputs(self, tensors)
        self.checked = True

    # -------------------------------------------------------------- running it

    def _run(self, program: Program, tensors: Sequence[torch.Tensor]) -> Any:
        if not program.trains:
            with torch.no_grad():
                flat = self.run_forward(program, tensors)[0]
            return program.rebuild(self._distributed(program, flat), tensors)
        params = [s.param for s in self.states.values() if s.param.requires_grad]
        flat = Call.apply(self, program, len(tensors), *tensors, *params)
        return program.rebuild(self._distributed(program, flat), tensors)

    def _distributed(
        self, program: Program, flat: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Flat outputs, those that tensor parallelism left cut as DTensors on its mesh dim."""
        layouts = program.captured.output_layouts
        if self.tensor_parallel is None or all(layout.replicated for layout in layouts):
            return flat
        mesh = self.mesh[self.tensor_parallel.axis]
        return [
            value
            if layout.dim is None
            else DTensor.from_local(value, mesh, [Shard(layout.dim)], run_check=False)
            for value, layout in zip(flat, layouts, strict=False)
        ]

    def run_forward(
        self, program: Program, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Runs forward; applies buffer updates; returns user outputs and saved values."""
        buffers = self._buffers(program)
        values: list[Any] = []
        role: Any
        for _, role in inputs(program.forward):
            if isinstance(role, ParamInput):
                values.append(self._weight(role.fqn))
            elif isinstance(role, BufferInput):
                values.append(buffers[role.fqn])
            else:
                values.append(tensors[role.index].detach())
        with without_autocast(self.device):  # its casts are in the program already
            results = program.run_forward(values, sizes_of(tensors))
        outputs: dict[int, torch.Tensor] = {}
        saved: list[Any] = []
        updates: list[tuple[torch.Tensor, torch.Tensor]] = []
        for value, role in zip(results, output_node(program.forward).meta["roles"], strict=True):
            if isinstance(role, UserOutput):
                outputs[role.index] = value
            elif isinstance(role, BufferUpdate):
                updates.append((buffers[role.fqn], value))
            elif isinstance(role, InputUpdate):
                updates.append((tensors[role.index].detach(), value))
            elif isinstance(role, SavedOutput):
                saved.append(value)
        for target, value in updates:
            # backward was traced for the value before the update
            saved = [v.clone() if same_memory(v, target) else v for v in saved]
            target.copy_(value)
        flat = [outputs[i] for i in sorted(outputs)]
        return flat, [alias_of_output(v, flat) for v in saved]

    def _weight(self, fqn: str) -> torch.Tensor:
        if self.unsharded is not None and fqn in self.unsharded:
            return self.unsharded[fqn]
        return self.states[fqn].program_input()

    def _buffers(self, program: Program) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for _, role in inputs(program.forward, BufferInput):
            if role.fqn in program.captured.constants:
                found[role.fqn] = program.captured.constants[role.fqn]
            else:
                found[role.fqn] = self.module.get_buffer(role.fqn)
        return found

    def run_backward(
        self,
        program: Program,
        sizes: Sizes,
        saved: list[Any],
        tangents: Sequence[torch.Tensor | None],
        outputs: Sequence[Like],
    ) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
        """Runs backward; returns reduced gradients by FQN (those handed to autograd) and input gradients.

        ``saved`` is emptied: a value that nothing else holds is freed while backward runs.
        An output that is not part of the loss has no tangent. It counts as zero, and what depends on such outputs only
        gets no gradient, as in eager PyTorch.
        """
        given = {UserOutput(i) for i, tangent in enumerate(tangents) if tangent is not None}
        choice = reduction.choose(self)
        gm = program.backward(choice.run)
        values: list[Any] = []
        role: Any
        for node, role in inputs(gm):
            if isinstance(role, SavedInput):
                values.append(saved[role.index])
                saved[role.index] = None
            else:
                traced = node.meta["val"]
                tangent = tangents[role.of.index] if role.of in given else None
                if tangent is None:
                    like = outputs[role.of.index] if isinstance(role.of, UserOutput) else traced
                    tangent = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
                values.append(match_layout(tangent, traced))
        with without_autocast(self.device):
            results = program.run_backward(choice.run, values, sizes)
        grads: dict[str, torch.Tensor] = {}
        input_grads: dict[int, torch.Tensor] = {}
        for value, role in zip(results, output_node(gm).meta["roles"], strict=True):
            if value is None or not program.outputs_behind[role] & given:
                continue
            if isinstance(role, ParamGrad):
                grads[role.fqn] = value
            elif isinstance(role, InputGrad):
                input_grads[role.index] = value
        grads = reduction.finish(self, choice, grads)
        if choice.after != "hold":
            self._guard.after_backward(grads)
        keep = not self.flags.reshard_after_backward or self.policy.zero_level == 2
        if self.flags.last_backward or not keep:
            self.reshard()
        return grads, input_grads


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leaves inference mode, if it is on: tensors made inside it could never be saved for backward."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def autocast_state(device: torch.device) -> tuple[bool, torch.dtype]:
    """What ``torch.autocast`` is set to: a program is captured with its casts, so it selects the program."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Runs a program's operators as they were captured."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
