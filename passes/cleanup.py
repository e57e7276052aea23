"""Cleanup: remove operators that only rename a value, before anything is matched, tagged or bucketed.

Contract: needs an annotated program; preserves roles, numerics and every output. Views that change neither shape nor
strides, ``detach``, ``alias`` and lifted copies go; an output edge stays on its own node.

    before                                after
      a = view(x, [8, 4])  # x: [8, 4]      y = mm(x, w)
      b = detach(a)
      y = mm(b, w)
"""

from __future__ import annotations

from torch import fx

from passes.base import aten, finish

_RENAMES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default})
_MAY_BE_IDENTITY = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.slice.Tensor,
    }
)


def cleanup(gm: fx.GraphModule) -> fx.GraphModule:
    """Removes identity views.

    Args:
        gm: annotated program; changed in place and returned.
    """
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not _is_identity(node):
            continue
        source = node.args[0]
        node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    return finish(gm, "cleanup")


def _is_identity(node: fx.Node) -> bool:
    if node.target in _RENAMES:
        return True
    if node.target not in _MAY_BE_IDENTITY:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    old, new = source.meta["val"], node.meta["val"]
    if old.dim() != new.dim():
        return False
    return _same(old.shape, new.shape) and _same(old.stride(), new.stride())


def _same(left: tuple[object, ...], right: tuple[object, ...]) -> bool:
    """Equal without adding a guard: symbols are compared as expressions."""
    return all(
        str(a) == str(b) if not (isinstance(a, int) and isinstance(b, int)) else a == b
        for a, b in zip(left, right, strict=True)
    )
