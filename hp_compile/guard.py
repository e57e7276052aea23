"""When a sharded module compares its replicas: when it is asked to, and in every step if the environment says so.

``HP_COMPILE_CHECK_REPLICAS=1`` compares parameters before the first forward that trains and before the first one after each
backward that handed out gradients, so after every optimizer step; and gradients when they are final. These moments depend on
the flags and the calls only, which are alike on all ranks, and not on whether a rank's optimizer ran. The variable is among
the facts that ranks compare before the first step, so one rank that has it alone is an error and not a hang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from hyper_parallel.replicas import (
    Replica,
    check_replicas,
    checks_every_step,
    gradients_of,
    parameters_of,
)

if TYPE_CHECKING:
    from hp_compile.runtime import Runtime


class ReplicaGuard:
    """Compares the replicas of one module; ignored parameters have none.

    Args:
        runtime: the module's runtime.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._due = True

    def check(self) -> None:
        """Compares all parameters and the gradients in ``.grad``, now.

        Raises:
            ReplicaError: replicas differ.
        """
        params = self._params()
        self._compare(parameters_of(params) + gradients_of(params))

    def before_forward(self) -> None:
        """Compares the parameters if the environment asks for it and a step may have changed them.

        Raises:
            ReplicaError: replicas differ.
        """
        if torch.is_grad_enabled() and checks_every_step() and self._due:
            self._compare(parameters_of(self._params()))
            self._due = False

    def after_backward(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Compares gradients that are about to be handed out, if the environment asks for it.

        Args:
            grads: padded shards by FQN.

        Raises:
            ReplicaError: replicas differ.
        """
        self._due = True
        if checks_every_step():
            states = self._runtime.states
            self._compare(
                [
                    Replica(
                        fqn,
                        states[fqn].plan.placements,
                        states[fqn].unpad(grads[fqn]) if fqn in grads else None,
                        "gradient",
                    )
                    for fqn in self._params()
                ]
            )

    def _params(self) -> dict[str, torch.Tensor]:
        states = self._runtime.states.items()
        return {fqn: state.param for fqn, state in states if not state.plan.ignored}

    def _compare(self, replicas: list[Replica]) -> None:
        runtime = self._runtime
        check_replicas(runtime.mesh, runtime.layout, replicas, runtime.device)
