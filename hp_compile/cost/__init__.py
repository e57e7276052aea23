"""Cost: bytes, memory, FLOPs and time of a planned step, in the sizes of the mesh, before a device is rented."""

from hp_compile.cost.hardware import BUILT_IN, Link, Profile, load_profile
from hp_compile.cost.liveness import DIRECT, GLOO, Transport
from hp_compile.cost.model import ADAMW, CostModel, Estimate, Memory, Optimizer
from hp_compile.cost.replan import replan
from hp_compile.cost.search import SweepRow, sweep, table
from hp_compile.cost.simulate import Timeline
from hp_compile.cost.trace import chrome_trace, write_trace

__all__ = [
    "ADAMW",
    "BUILT_IN",
    "DIRECT",
    "GLOO",
    "CostModel",
    "Estimate",
    "Link",
    "Memory",
    "Optimizer",
    "Profile",
    "SweepRow",
    "Timeline",
    "Transport",
    "chrome_trace",
    "load_profile",
    "replan",
    "sweep",
    "table",
    "write_trace",
]
