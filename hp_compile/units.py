"""Units: which parameters are gathered and reduced together.

``"auto"`` takes repeated blocks: the children of an ``nn.ModuleList`` or ``nn.Sequential`` that has at least two children
of one class with parameters, or of an ``nn.ModuleDict`` whose children are all of one class. The outermost such containers
count; what no block owns belongs to the root unit. A glob names modules by FQN (``"layers.*"``): of the modules that one glob
matches the outermost are units, so their submodules stay with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from hyper_parallel.errors import PolicyError

#: Name of the unit of everything outside the blocks.
ROOT_UNIT = "(root)"


@dataclass(frozen=True)
class Units:
    """Assignment of parameters to units.

    Attributes:
        of: unit name of every parameter FQN (first names of tied parameters).
        order: unit names in registration order.
        modules: FQNs of the modules that are units, root excluded.
    """

    of: Mapping[str, str]
    order: tuple[str, ...]
    modules: tuple[str, ...]


def resolve_units(module: nn.Module, units: str | Sequence[str]) -> Units:
    """Finds the units of a module.

    Args:
        module: the model.
        units: ``"auto"`` or FQN globs of modules.

    Raises:
        PolicyError: a glob matches no module.
    """
    modules = _repeated_blocks(module) if units == "auto" else _matching(module, units)
    of: dict[str, str] = {}
    for fqn, _ in module.named_parameters():
        owner = max((m for m in modules if fqn.startswith(m + ".")), key=len, default=ROOT_UNIT)
        of[fqn] = owner
    return Units(of, tuple(dict.fromkeys(of.values())), tuple(modules))


def _repeated_blocks(module: nn.Module) -> list[str]:
    found: list[str] = []

    def visit(prefix: str, parent: nn.Module) -> None:
        children = [
            (n, c) for n, c in parent.named_children() if next(c.parameters(), None) is not None
        ]
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            if _repeats(children) >= 2:
                found.extend(prefix + n for n, _ in children)
                return
        elif isinstance(parent, nn.ModuleDict) and len(children) == _repeats(children) >= 2:
            found.extend(prefix + n for n, _ in children)
            return
        for name, child in children:
            visit(f"{prefix}{name}.", child)

    visit("", module)
    return found


def _repeats(children: Sequence[tuple[str, nn.Module]]) -> int:
    """How many children have the most frequent class."""
    common = Counter(type(child) for _, child in children).most_common(1)
    return common[0][1] if common else 0


def _matching(module: nn.Module, globs: Sequence[str]) -> list[str]:
    globs = (globs,) if isinstance(globs, str) else globs
    names = [n for n, m in module.named_modules() if n and next(m.parameters(), None) is not None]
    chosen: set[str] = set()
    for glob in globs:
        hits = [n for n in names if fnmatchcase(n, glob)]
        if not hits:
            close = ", ".join(names[:8])
            raise PolicyError(
                f"policy.units: {glob!r} matches no module with parameters; modules are {close}"
                f"{', …' if len(names) > 8 else ''}"
            )
        chosen.update(h for h in hits if not any(h.startswith(o + ".") for o in hits))
    return [n for n in names if n in chosen]
