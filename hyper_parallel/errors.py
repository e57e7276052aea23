"""The one family of errors that this software raises on purpose.

Every message answers three questions: which parameter (FQN) or mesh dim, what was expected, and
what to change. The classes that report bad input are also ``ValueError``, those that report a
failed step are also ``RuntimeError``, so code that catches the built-in classes keeps working.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "HPCompileError",
    "MeshError",
    "PlacementError",
    "PolicyError",
    "ReplicaError",
    "ShardedStateError",
    "UnusedParameterError",
    "VerificationError",
]


class HPCompileError(Exception):
    """Base class: catching it catches every error that is raised on purpose."""


class MeshError(HPCompileError, ValueError):
    """The mesh, a mesh dim or its role does not fit: names, sizes, ranks."""


class PolicyError(HPCompileError, ValueError):
    """A policy field has the wrong type, or the policy does not fit the mesh or the model."""


class PlacementError(HPCompileError, ValueError):
    """A parameter cannot have the placement that was asked for: names the FQN and the shape."""


class ShardedStateError(HPCompileError, RuntimeError):
    """A parameter or module is in another state than the operation needs: names both states."""


class UnusedParameterError(HPCompileError, RuntimeError):
    """Ranks used different parameters in one backward: names them and how many ranks."""


class ReplicaError(HPCompileError, RuntimeError):
    """Ranks that should hold the same bytes do not: names the FQN, the mesh dim and the ranks."""


class CaptureError(HPCompileError, RuntimeError):
    """A model could not be captured: names the module's FQN and the source line."""


class VerificationError(HPCompileError, RuntimeError):
    """A program does not reduce every gradient exactly once on every axis."""
