"""What the verifier knows about one node of a program."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.verify.packing import Pack


@dataclass(frozen=True)
class Value:
    """What is known about one node.

    Attributes:
        digest: name of a computed value; ``None`` while packed.
        state: R, S or V on every axis of the interpreter.
        pack: elements of a packed value, and of a parameter that was gathered.
        parts: of a split packed value.
        weight: FQN of the gathered parameter of which this is the whole, a view or a cast.
        pending: the collective that has not been waited for.
    """

    digest: str | None
    state: tuple[str, ...]
    pack: Pack | None = None
    parts: tuple[Pack, ...] | None = None
    weight: str | None = None
    pending: fx.Node | None = None

    @property
    def packed(self) -> bool:
        """Whether only data movement may read it."""
        return self.digest is None
