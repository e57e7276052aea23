"""Which dtypes travel as they are: complex gradients go as pairs of reals, odd slices as bytes.

Backends send few dtypes and reduce fewer, and a count of missing gradients needs numbers that can
be ordered. So a gather of anything but the usual floats moves bytes, and the gradient of a complex
parameter is reduced in the real dtype of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hyper_parallel.errors import PolicyError
from hyper_parallel.policy import MixedPrecisionPolicy

__all__ = ["check_reducible", "gathers_as_is", "reals_per_element", "to_reals"]

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def gathers_as_is(dtype: torch.dtype) -> bool:
    """Tells whether a buffer to gather has this dtype; else it holds bytes."""
    return dtype in _FLOATS


def reals_per_element(dtype: torch.dtype) -> int:
    """Returns how many numbers of the wire one element takes."""
    return 2 if dtype.is_complex else 1


def to_reals(tensor: Tensor) -> Tensor:
    """Returns a complex tensor as pairs of reals, ``[..., 2]``; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def check_reducible(
    entries: Sequence[tuple[str, nn.Parameter]], mp_policy: MixedPrecisionPolicy
) -> None:
    """Checks that the gradients of all trained parameters can be reduced.

    Args:
        entries: FQNs and parameters.
        mp_policy: The policy that says in which dtype.

    Raises:
        PolicyError: A gradient would be reduced in a dtype that has no arithmetic.
    """
    for fqn, param in entries:
        dtype = mp_policy.reduce_dtype or mp_policy.param_dtype or param.dtype
        if param.requires_grad and dtype.to_real() not in _FLOATS:
            raise PolicyError(
                f"{fqn}: its gradient would be reduced in {dtype}, which collectives cannot sum; "
                f"pass MixedPrecisionPolicy(reduce_dtype=torch.float32), or freeze it with "
                f"requires_grad_(False)"
            )
