"""The program cache: which program serves a call, and when a new one is captured.

A program is selected by everything that its graph has baked in: the input signature, the mode (train flags of every submodule,
grad mode, autocast), which parameters train, the flags of the runtime, and the modules' own attributes, by value
(``hp_compile.attributes``). Sizes are not part of that: each program says which it accepts.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hp_compile.program import Program, Sizes, sizes_of
from hp_compile.signature import Signature

log = logging.getLogger("hp_compile")

#: A warning is logged when one signature has this many programs, and again at each doubling.
MAX_PROGRAMS = 8
#: Programs kept in all; the one that was not used for longest goes.
MAX_KEPT = 64

#: Captures one program for a call; ``True`` makes all dims symbolic.
Capture = Callable[[bool], Program]


class ProgramCache:
    """Programs of one sharded module.

    Attributes:
        by_key: programs by everything but sizes.
    """

    def __init__(self) -> None:
        self.by_key: dict[Any, list[Program]] = {}
        self._recent: OrderedDict[int, tuple[Any, Program]] = OrderedDict()
        self._signatures: dict[Any, list[Signature]] = {}
        self._states: list[tuple[Any, ...]] = []
        self.captures = 0

    def get(
        self,
        signature: Signature,
        tensors: Sequence[torch.Tensor],
        mode: tuple[Any, ...],
        state: tuple[Any, ...],
        capture: Capture,
    ) -> Program:
        """The program for a call, captured now if none accepts its sizes.

        Args:
            signature: signature of the call.
            tensors: its flat tensors.
            mode: grad mode, autocast and flags.
            state: attributes of the modules (see ``hp_compile.attributes``).
            capture: captures a new one.
        """
        key = (signature, mode, state)
        known = self.by_key.setdefault(key, [])
        for program in known:
            if program.accepts(tensors):
                self._recent.move_to_end(id(program))
                return program
        sizes = sizes_of(tensors)
        wide = any(_differ_beyond_batch(sizes, program.traced) for program in known)
        self.captures += 1
        log.info(
            "capturing program %d of this signature (%d in all) for sizes %s%s",
            len(known) + 1,
            self.captures,
            _text(sizes),
            ", all dims symbolic" if wide else "",
        )
        self._warn(signature, state, known, sizes)
        program = capture(wide)
        known.append(program)
        self._recent[id(program)] = (key, program)
        self._evict()
        return program

    def clear(self) -> None:
        """Forgets all programs."""
        self.by_key.clear()
        self._recent.clear()

    def _evict(self) -> None:
        while len(self._recent) > MAX_KEPT:
            _, (key, program) = self._recent.popitem(last=False)
            self.by_key[key].remove(program)
            log.warning("more than %d programs: dropping the one not used for longest", MAX_KEPT)

    def _warn(
        self,
        signature: Signature,
        state: tuple[Any, ...],
        known: Sequence[Program],
        sizes: Sizes,
    ) -> None:
        if _time_to_warn(len(known)):
            log.warning(
                "captured %d programs for one input signature; latest sizes %s, and the last program accepts only %s. "
                "Each takes compile time: pad inputs to few sizes, or keep sizes out of Python numbers in "
                "forward (float(x.shape[0]), a loop over the batch)",
                len(known) + 1,
                _text(sizes),
                _text(known[-1].captured.input_shapes),
            )
        seen = self._signatures.setdefault(signature.kinds, [])
        if signature not in seen:
            if _time_to_warn(len(seen)):
                log.warning(
                    "captured programs for %d values of a constant argument, the latest is %s; pass a number that changes "
                    "as a tensor",
                    len(seen) + 1,
                    _first_change(seen[-1].describe(), signature.describe()),
                )
            seen.append(signature)
        if state not in self._states:
            if _time_to_warn(len(self._states)):
                log.warning(
                    "captured programs for %d states of the modules' attributes; an attribute that changes between calls "
                    "(a schedule, a counter) should be a buffer",
                    len(self._states) + 1,
                )
            self._states.append(state)


def _differ_beyond_batch(sizes: Sizes, traced: Sizes) -> bool:
    return any(a[1:] != b[1:] for a, b in zip(sizes, traced, strict=True))


def _time_to_warn(count: int) -> bool:
    return count >= MAX_PROGRAMS and count & (count - 1) == 0


def _text(shapes: Sequence[Sequence[Any]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def _first_change(before: Sequence[str], after: Sequence[str]) -> str:
    return next((b for a, b in zip(before, after, strict=False) if a != b), "another structure")


__all__ = ["MAX_KEPT", "MAX_PROGRAMS", "Capture", "ProgramCache"]
