"""Low-rank adapters (Hu et al., 2021, "LoRA") beside frozen linear layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class LoRALinear(nn.Linear):
    """x Wᵀ + b + (alpha / rank) (x Aᵀ) Bᵀ, with W and b of an existing layer, which keep their names.

    Args:
        base: The layer; its parameters are taken over.
        rank: Rows of A and columns of B.
        alpha: Weight of the adapter.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, rank))

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., in_features) to (..., out_features)."""
        low = F.linear(F.linear(input, self.lora_a), self.lora_b)
        return F.linear(input, self.weight, self.bias) + self.scale * low


def add_adapters(model: nn.Module, targets: Iterable[str], rank: int, alpha: float) -> list[str]:
    """Freezes a plain model and puts adapters on its linear layers of these names.

    Args:
        model: The model, with weights or on meta.
        targets: Last parts of module names, e.g. `q_proj`.
        rank: Rank of the adapters.
        alpha: Their weight.

    Returns:
        Names of the adapters' parameters.

    Raises:
        ValueError: No layer has such a name.
    """
    wanted = set(targets)
    model.requires_grad_(False)
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if name in wanted and isinstance(layer, nn.Linear):
                setattr(owner, name, LoRALinear(layer, rank, alpha))
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    if not names:
        raise ValueError(f"no linear layer is named {' or '.join(sorted(wanted))}")
    return names


def initial_adapters(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Full first values, the same on every mesh: A random, B zero, so that training starts at the base model."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, layer in adapted(model):
        bound = 1 / math.sqrt(layer.in_features)
        noise = torch.rand(tuple(layer.lora_a.shape), generator=generator)
        values[f"{name}.lora_a"] = (2 * noise - 1) * bound
        values[f"{name}.lora_b"] = torch.zeros(tuple(layer.lora_b.shape))
    return values


def adapted(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """The layers that have adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Adds the adapters to the weights, one full weight at a time, and sets B to zero; collective if sharded."""
    for name, layer in adapted(model):
        update = layer.scale * full(layer.lora_b) @ full(layer.lora_a)
        merged = {f"{name}.weight": full(layer.weight) + update}
        merged[f"{name}.lora_b"] = torch.zeros_like(full(layer.lora_b))
        model.load_state_dict(merged, strict=False)


def full(param: Tensor) -> Tensor:
    """The whole tensor, also of a sharded parameter."""
    return param.full_tensor() if isinstance(param, DTensor) else param.detach()
