"""Many names as few: the short form stands for exactly the names it was made from."""

from __future__ import annotations

import doctest
import itertools
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hp_compile import patterns
from hp_compile.patterns import compress, grouped

NAMES = st.lists(
    st.from_regex(r"[ab](\.[0-3]){0,3}(\.w)?", fullmatch=True), unique=True, max_size=30
)


def expand(pattern: str) -> list[str]:
    """Return all names that a pattern stands for, written independently of the code."""
    choices = []
    for part in re.split(r"(\{[^}]*\})", pattern):
        if not part.startswith("{"):
            choices.append([part])
            continue
        numbers: list[str] = []
        for run in part[1:-1].split(","):
            first, _, last = run.partition("..")
            numbers += map(str, range(int(first), int(last or first) + 1))
        choices.append(numbers)
    return ["".join(choice) for choice in itertools.product(*choices)]


@given(NAMES)
def test_patterns_stand_for_exactly_their_names(names: list[str]) -> None:
    found = [name for pattern in compress(names) for name in expand(pattern)]
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["head"], ["head"]),
        (["h.0.w", "h.1.w", "h.3.w"], ["h.{0..1,3}.w"]),
        ([f"l.{i}.e.{j}" for i in range(2) for j in range(3)], ["l.{0..1}.e.{0..2}"]),
        (["fc1.w", "fc2.w"], ["fc1.w", "fc2.w"]),  # part of a word is no index
        (["l.0+l.1", "l.2+l.3"], ["l.0+l.1", "l.2+l.3"]),
        (["l.0", "l.0"], ["l.0"]),
    ],
)
def test_examples(names: list[str], expected: list[str]) -> None:
    assert compress(names) == expected


def test_groups_are_equal_and_in_order() -> None:
    items = [("l.0.w", 1), ("head", 5), ("l.1.w", 1), ("l.2.w", 2)]
    groups = grouped(items, name=lambda i: i[0], key=lambda i: i[1])
    assert [(g.name, g.items) for g in groups] == [
        ("l.{0..1}.w", (items[0], items[2])),
        ("head", (items[1],)),
        ("l.2.w", (items[3],)),
    ]


def test_docstrings() -> None:
    failed, run = doctest.testmod(patterns)
    assert (failed, run) == (0, 1)
