"""What tensor parallelism computes between the model's own operators: collectives with their gradients.

Two facts give every rule here. The gradient of a value that all ranks hold alike is alike on all ranks, too. And a
value that all ranks hold alike, but use with different other values, gets a *term* of its gradient on every rank; then the
terms have to be summed. :func:`vary` is the point where that changes: nothing in forward, an all-reduce in backward. It is
Megatron-LM's ``f`` (Shoeybi et al., 2019, arXiv 1909.08053) and JAX's ``pvary``.

================  ======================  ==============================
function          forward                 backward
================  ======================  ==============================
``vary``          nothing                 all-reduce
``total``         all-reduce              nothing
``gather``        all-gather              this rank's part
``gather_vary``   all-gather              reduce-scatter
``part``          this rank's part        all-gather
``scatter_total`` reduce-scatter          all-gather
================  ======================  ==============================
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hyper_parallel.ops  # noqa: F401  registers take_chunk and local_ids
from passes.base import GATHER, REDUCE, SCATTER, WAIT

_take_chunk = torch.ops.hyper_parallel.take_chunk.default
_local_ids = torch.ops.hyper_parallel.local_ids.default


# ------------------------------------------------------------------ collectives on any dim, packed or not


def _all_reduce(value: Tensor, op: str, group: str) -> Tensor:
    return WAIT(REDUCE(value.contiguous(), op, group))  # type: ignore[no-any-return]


def _all_gather(value: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    rows = value.size(dim) // blocks
    everyone = WAIT(GATHER(value.contiguous(), size, group)).unflatten(0, (size, value.size(0)))
    if dim == 0 and blocks == 1:
        return everyone.flatten(0, 1)  # type: ignore[no-any-return]
    split = everyone.unflatten(dim + 1, (blocks, rows)).movedim(0, dim + 1)
    return split.flatten(dim, dim + 2)  # type: ignore[no-any-return]


def _reduce_scatter(value: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    rows = value.size(dim) // (blocks * size)
    first = value.unflatten(dim, (blocks, size, rows)).movedim(dim + 1, 0)
    flat = first.flatten(dim + 1, dim + 2)
    return WAIT(SCATTER(flat.flatten(0, 1).contiguous(), "sum", size, group))  # type: ignore[no-any-return]


class _Vary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: str) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _all_reduce(grad, "sum", ctx.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: str) -> Tensor:
        return _all_reduce(value, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, dim: int, blocks: int, size: int, group: str, terms: bool
    ) -> Tensor:
        ctx.where = (dim, blocks, size, group)
        ctx.terms = terms
        return _all_gather(value, dim, blocks, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        back = _reduce_scatter if ctx.terms else _take_chunk
        return back(grad, *ctx.where), None, None, None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
        ctx.where = (dim, blocks, size, group)
        return _take_chunk(value, dim, blocks, size, group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _all_gather(grad, *ctx.where), None, None, None, None


class _ScatterTotal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
        ctx.where = (dim, blocks, size, group)
        return _reduce_scatter(value, dim, blocks, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _all_gather(grad, *ctx.where), None, None, None, None


def vary(value: Tensor, group: str) -> Tensor:
    """A replicated value on its way into computation that differs over the ranks.

    Args:
        value: the same on all ranks.
        group: alias of the group.
    """
    return _Vary.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def total(value: Tensor, group: str) -> Tensor:
    """The sum of every rank's term, on all ranks.

    Args:
        value: a term on every rank.
        group: alias of the group.
    """
    return _Total.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def gather(value: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    """The whole of a sharded value, for computation that is the same on all ranks.

    Args:
        value: this rank's part.
        dim: dim that is cut.
        blocks: blocks of it that are cut one by one.
        size: ranks of the group.
        group: alias of the group.
    """
    return _Gather.apply(value, dim, blocks, size, group, False)  # type: ignore[no-any-return, no-untyped-call]


def gather_vary(value: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    """``vary(gather(value))`` with one collective in backward: the whole, for computation that differs over the ranks.

    Args:
        value: this rank's part.
        dim: dim that is cut.
        blocks: blocks of it that are cut one by one.
        size: ranks of the group.
        group: alias of the group.
    """
    return _Gather.apply(value, dim, blocks, size, group, True)  # type: ignore[no-any-return, no-untyped-call]


def part(value: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    """This rank's part of a replicated value.

    Args:
        value: the same on all ranks.
        dim: dim to cut.
        blocks: blocks of it that are cut one by one.
        size: ranks of the group.
        group: alias of the group.
    """
    return _Part.apply(value, dim, blocks, size, group)  # type: ignore[no-any-return, no-untyped-call]


def scatter_total(value: Tensor, dim: int, blocks: int, size: int, group: str) -> Tensor:
    """This rank's part of the sum of every rank's term.

    Args:
        value: a term on every rank.
        dim: dim to cut.
        blocks: blocks of it that are cut one by one.
        size: ranks of the group.
        group: alias of the group.
    """
    return _ScatterTotal.apply(value, dim, blocks, size, group)  # type: ignore[no-any-return, no-untyped-call]


# ------------------------------------------------------------------ operators over a vocabulary that is cut


def vocab_embedding(weight: Tensor, ids: Tensor, padding_idx: int, group: str) -> Tensor:
    """A term of an embedding lookup: rows of this rank's part of the table, zero for all other ids.

    Args:
        weight: this rank's rows ``[rows, features]``.
        ids: row numbers of the whole table, any shape.
        padding_idx: the row that gets no gradient, or -1.
        group: alias of the group.

    Returns:
        ``[*ids.shape, features]``; the sum over the ranks is the lookup.
    """
    rows = weight.size(0)
    local = _local_ids(ids, rows, group)
    inside = (local >= 0) & (local < rows)
    found = F.embedding(torch.where(inside, local, 0), weight)
    if padding_idx >= 0:
        found = torch.where((ids == padding_idx).unsqueeze(-1), found.detach(), found)
    return torch.where(inside.unsqueeze(-1), found, 0.0)


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    size: int,
    group: str,
) -> Tensor:
    """Cross entropy of logits that are cut over the vocabulary; no rank sees a whole row.

    Two all-reduces of one and of two (with label smoothing three) numbers a row, none in backward.

    Args:
        logits: this rank's columns ``[tokens, columns]``.
        target: class numbers of the whole vocabulary ``[tokens]``.
        reduction: 0 none, 1 mean, 2 sum.
        ignore_index: target value that does not count.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        size: ranks of the group.
        group: alias of the group.

    Returns:
        The loss: ``[]``, or ``[tokens]`` for reduction 0.
    """
    columns = logits.size(-1)
    highest = _all_reduce(logits.detach().amax(-1), "max", group)
    shifted = logits - highest.unsqueeze(-1)
    local = _local_ids(target, columns, group)
    inside = (local >= 0) & (local < columns)
    chosen = shifted.gather(-1, torch.where(inside, local, 0).unsqueeze(-1)).squeeze(-1)
    terms = [shifted.exp().sum(-1), torch.where(inside, chosen, 0.0)]
    if label_smoothing:
        terms.append(shifted.sum(-1))
    sums = total(torch.stack(terms), group).unbind(0)
    log_sum = sums[0].log()
    loss = log_sum - sums[1]
    if label_smoothing:
        smooth = log_sum - sums[2] / (columns * size)
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    counts = target != ignore_index
    loss = torch.where(counts, loss, 0.0)
    if reduction == 0:
        return loss
    return loss.sum() / counts.sum() if reduction == 1 else loss.sum()


#: Operators whose second argument counts rows of a vocabulary that is cut.
BY_IDS = frozenset({vocab_embedding, vocab_cross_entropy})


def dropout_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    dim: int,
    size: int,
    group: str,
) -> Tensor:
    """Attention with dropout of its weights, for this rank's heads (see :func:`whole_dropout`).

    Args:
        query: ``[..., heads, length, features]``.
        key: ``[..., heads, source, features]``.
        value: ``[..., heads, source, features]``.
        mask: boolean (True may attend) or added to the scores; broadcasts.
        p: probability of a zero.
        causal: attend to earlier positions only.
        scale: factor of the scores; ``1/sqrt(features)`` by default.
        grouped: keys and values may have fewer heads.
        dim: dim that is cut.
        size: ranks of the group.
        group: alias of the group.
    """
    if grouped:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if causal:
        shape = (query.size(-2), key.size(-2))
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        may = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if may else scores + mask
    weights = whole_dropout(scores.softmax(-1), p, dim, 1, size, group)
    return weights @ value


def whole_dropout(value: Tensor, p: float, dim: int, blocks: int, size: int, group: str) -> Tensor:
    """Dropout of a sharded value with the mask that the whole value would get.

    All ranks of the group draw the mask of the whole value, from equal generators, and each uses its part: the numbers
    are those of one device, and ranks do not repeat each other's mask.

    Args:
        value: this rank's part.
        p: probability of a zero.
        dim: dim that is cut.
        blocks: blocks of it that are cut one by one.
        size: ranks of the group.
        group: alias of the group.
    """
    shape = list(value.shape)
    shape[dim] = shape[dim] * size
    mask = F.dropout(value.detach().new_ones(shape), p, True)
    return value * _take_chunk(mask, dim, blocks, size, group)
