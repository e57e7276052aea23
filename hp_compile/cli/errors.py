"""Errors of the command line itself."""

from __future__ import annotations

from hyper_parallel.errors import HPCompileError


class RequestError(HPCompileError, ValueError):
    """The command line asks for something that cannot be made: names the argument and what would do."""


class Finding(Exception):
    """A command found what it looks for, and has printed it: exit code 1."""
