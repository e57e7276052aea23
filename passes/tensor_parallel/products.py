"""Layout rules of products: projections, attention, lookups in a vocabulary and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from passes.base import aten, hint
from passes.tensor_parallel import functional
from passes.tensor_parallel.layout import REPLICATED, Layout, sharded
from passes.tensor_parallel.rule import Call, Decision, Emit, rule, shape_of
from passes.tensor_parallel.shapes import same_size


def _contract(
    call: Call, operands: Sequence[tuple[fx.Node, str]], out: str
) -> tuple[Layout, bool, dict[fx.Node, Layout]] | None:
    """Layouts of a product whose operands' dims have letters: output, whether it is a term, inputs.

    Parameters stay where they are; activations follow them.
    """
    cut = [(n, s, call.layout(n)) for n, s in operands if not call.layout(n).replicated]
    cut.sort(key=lambda item: not call.is_param(item[0]))
    for node, letters, layout in cut:
        assert layout.dim is not None
        letter = letters[layout.dim]
        others = [(n, s) for n, s in operands if n is not node and letter in s]
        summed = letter not in out
        if summed and not call.is_param(node) and any(call.is_param(n) for n, _ in others):
            call.refuse("its weight is whole; a row-wise style would let it work on parts")
            continue  # a whole weight is not cut for the sake of an activation
        if layout.blocks > 1 and (summed or others):
            continue
        inputs = {n: REPLICATED for n, _ in operands}
        inputs[node] = layout
        for other, s in others:
            length = shape_of(other)[s.index(letter)]
            if not same_size(length, 1):
                inputs[other] = sharded(s.index(letter))
        output = REPLICATED if summed else layout.at(out.index(letter))
        return output, summed, inputs
    return None


def _letters(rank: int, last: str) -> str:
    """Letters of a batched matrix: batch dims are ``A``, ``B`` … from the right, then ``last``."""
    batch = "ABCDEFGH"[: rank - len(last)]
    return batch[::-1] + last


@rule(aten.linear.default)
def _linear(call: Call) -> Decision | None:
    source, weight, bias = (call.argument(n) for n in ("input", "weight", "bias"))
    rank = len(shape_of(source))
    left, out = _letters(rank, "k"), _letters(rank, "n")
    return _product(call, [(source, left), (weight, "nk")], out, bias)


@rule(aten.addmm.default)
def _addmm(call: Call) -> Decision | None:
    bias, left, right = (call.argument(n) for n in ("self", "mat1", "mat2"))
    if call.argument("beta") != 1 or call.argument("alpha") != 1:
        return None
    return _product(call, [(left, "mk"), (right, "kn")], "mn", bias, bias_first=True)


def _product(
    call: Call,
    operands: Sequence[tuple[fx.Node, str]],
    out: str,
    bias: fx.Node | None,
    bias_first: bool = False,
) -> Decision | None:
    """A product with a bias along its last dim, which is added once: after the sum over the ranks."""
    found = _contract(call, operands, out)
    if found is None:
        return None
    output, partial, inputs = found
    if bias is None:
        return Decision(output, inputs, partial)
    if not partial:
        along = output.dim == len(out) - 1
        inputs[bias] = output.at(len(shape_of(bias)) - 1) if along else REPLICATED
        return Decision(output, inputs)
    plain = aten.mm.default if bias_first else aten.linear.default

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        return add(plain, *(args[1:3] if bias_first else args[:2]))

    return Decision(output, inputs, True, emit, after=(bias,))


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _matmul(call: Call) -> Decision | None:
    left, right = call.node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    ranks = len(shape_of(left)), len(shape_of(right))
    if left is right or min(ranks) < 2:
        return None
    operands = [(left, _letters(ranks[0], "mk")), (right, _letters(ranks[1], "kn"))]
    return _product(call, operands, _letters(max(ranks), "mn"), None)


@rule(aten.einsum.default)
def _einsum(call: Call) -> Decision | None:
    equation, tensors = call.node.args[:2]
    assert isinstance(equation, str)
    equation = equation.replace(" ", "")
    if "..." in equation or "->" not in equation or len(set(tensors)) != len(tensors):  # type: ignore[arg-type]
        return None
    sides, out = equation.split("->")
    operands = list(zip(tensors, sides.split(","), strict=True))  # type: ignore[arg-type]
    if any(len(set(letters)) != len(letters) for _, letters in operands):
        return None
    return _product(call, operands, out, None)


@rule(aten.scaled_dot_product_attention.default)
def _attention(call: Call) -> Decision | None:
    """Heads (or batch rows) are computed apart; queries, keys and values are cut alike."""
    query, key, value, mask = (call.argument(n) for n in ("query", "key", "value", "attn_mask"))
    if len({query, key, value}) < 3:
        return None
    rank = len(shape_of(query))
    cut = [n for n in (query, key, value) if not call.layout(n).replicated]
    if not cut:
        return None
    chosen = call.layout(cut[0])
    if chosen.dim is None or chosen.dim >= rank - 2 or chosen.blocks > 1:
        return None
    lengths = [shape_of(n)[chosen.dim] for n in (query, key, value)]
    if not all(map(call.divides, lengths)):
        shown = ", ".join(str(hint(n)) for n in lengths)
        call.refuse(f"its heads ({shown}) do not divide over {call.size} ranks")
        return None
    inputs = dict.fromkeys((query, key, value), chosen)
    if mask is not None:
        shape = shape_of(mask)
        dim = chosen.dim - (rank - len(shape))
        alone = dim < 0 or same_size(shape[dim], 1)
        inputs[mask] = REPLICATED if alone else sharded(dim)
    p = call.argument("dropout_p")
    if not p:
        return Decision(chosen, inputs)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    order = {a.name: i for i, a in enumerate(call.node.target._schema.arguments)}  # type: ignore[union-attr]

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        given = [
            args[order[n]] if order[n] < len(args) else kwargs.get(n, call.argument(n))
            for n in names
        ]
        return add(functional.dropout_attention, *given, chosen.dim, call.size, call.group)

    return Decision(chosen, inputs, emit=emit)


# ------------------------------------------------------------------ vocabulary


@rule(aten.embedding.default)
def _embedding(call: Call) -> Decision | None:
    weight, ids = call.argument("weight"), call.argument("indices")
    table, rows = call.layout(weight), call.layout(ids)
    rank = len(shape_of(ids))
    if table.dim == 1:
        return Decision(table.at(rank), {weight: table})
    if table.dim == 0:
        if table.blocks > 1 or call.argument("scale_grad_by_freq") or call.argument("sparse"):
            return None
        padding = call.argument("padding_idx")
        padding += shape_of(weight)[0] if -shape_of(weight)[0] <= padding < -1 else 0

        def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
            return add(functional.vocab_embedding, args[0], args[1], padding, call.group)

        return Decision(REPLICATED, {weight: table}, partial=True, emit=emit)
    return Decision(rows, {ids: rows})


@rule(aten.cross_entropy_loss.default)
def _cross_entropy(call: Call) -> Decision | None:
    logits, target = call.argument("self"), call.argument("target")
    layout = call.layout(logits)
    simple = len(shape_of(logits)) == 2 and not target.meta["val"].is_floating_point()
    if layout.dim != 1 or layout.blocks > 1 or not simple or call.argument("weight") is not None:
        return None
    options = [call.argument(n) for n in ("reduction", "ignore_index", "label_smoothing")]

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        call_args = (args[0], args[1], *options, call.size, call.group)
        return add(functional.vocab_cross_entropy, *call_args)

    return Decision(REPLICATED, {logits: layout}, emit=emit)
