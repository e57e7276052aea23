"""Many names as few: ``layers.0.w``, ``layers.1.w``, ``layers.3.w`` is ``layers.{0..1,3}.w``."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_NUMBER = re.compile(r"(?<![\w])(\d+)(?![\w])")
_Indices = tuple[int, ...]
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Group(Generic[_Item]):
    """Things that are equal but for the numbers in their names.

    Attributes:
        name: all names in one.
        items: the things, in the order given.
    """

    name: str
    items: tuple[_Item, ...]


def compress(names: Iterable[str]) -> list[str]:
    """Writes names with ranges in place of numbers; together they stand for exactly the given names.

    Args:
        names: dotted names, any order; duplicates count once.

    Example:
        >>> compress(["head", "layers.0.w", "layers.1.w", "layers.0.b"])
        ['head', 'layers.{0..1}.w', 'layers.0.b']
    """
    return [group.name for group in grouped(dict.fromkeys(names), name=str, key=lambda _: None)]


def grouped(
    items: Iterable[_Item], *, name: Callable[[_Item], str], key: Callable[[_Item], Hashable]
) -> list[Group[_Item]]:
    """Groups things with equal keys and names that differ in numbers only.

    Args:
        items: the things; names are distinct.
        name: the name of one.
        key: what has to be equal.

    Returns:
        Groups in the order of their first members.
    """
    alike: dict[tuple[tuple[str, ...], Hashable], dict[_Indices, _Item]] = {}
    for item in items:
        parts = _NUMBER.split(name(item))
        indices = tuple(map(int, parts[1::2]))
        alike.setdefault((tuple(parts[::2]), key(item)), {})[indices] = item
    found: list[Group[_Item]] = []
    for (texts, _), members in alike.items():
        for block in _blocks(list(members)):
            chosen = tuple(m for i, m in members.items() if _inside(i, block))
            found.append(Group(_write(texts, block), chosen))
    return found


def _inside(indices: _Indices, block: Sequence[frozenset[int]]) -> bool:
    return all(i in numbers for i, numbers in zip(indices, block, strict=True))


def _blocks(points: Sequence[_Indices]) -> list[tuple[frozenset[int], ...]]:
    """Splits points into products of sets: layers 0 to 3 with experts 0 to 7 are one."""
    if not points[0]:
        return [()]
    rest: dict[int, list[_Indices]] = {}
    for first, *others in points:
        rest.setdefault(first, []).append(tuple(others))
    alike: dict[frozenset[_Indices], list[int]] = {}
    for first, others_ in rest.items():
        alike.setdefault(frozenset(others_), []).append(first)
    return [
        (frozenset(firsts), *block)
        for others_, firsts in alike.items()
        for block in _blocks(sorted(others_))
    ]


def _write(texts: Sequence[str], block: Sequence[frozenset[int]]) -> str:
    parts = [texts[0]]
    for numbers, text in zip(block, texts[1:], strict=True):
        parts += [numbers_text(numbers), text]
    return "".join(parts)


def numbers_text(numbers: Iterable[int]) -> str:
    """``{0..3,7}`` for several numbers, the number itself for one.

    Args:
        numbers: the numbers, any order.
    """
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"


__all__ = ["Group", "compress", "grouped", "numbers_text"]
