"""The eager path: sharded data parallelism by hooks, with FSDP2's behaviour and the seeds' names.

::

    api.py        fully_shard, hsdp           gather.py   one all-gather a unit
    module.py     HSDPModule                  reduce.py   one reduce-scatter, one all-reduce
    state.py      the schedule of a unit      param.py    HSDPParam, its states
    lifetime.py   when parameters are full    full.py     the full parameter and its storage
    context.py    what units of a model share slice.py    the slice that a rank keeps
                                              geometry.py a parameter on the wire
"""

from hyper_parallel.fully_shard.api import fully_shard, hsdp, register_fsdp_forward_method
from hyper_parallel.fully_shard.by_policy import fully_shard_by_policy
from hyper_parallel.fully_shard.module import (
    HSDPCell,
    HSDPModule,
    UnshardHandle,
    share_comm_ctx,
)
from hyper_parallel.fully_shard.param import HSDPParam, ShardedState
from hyper_parallel.fully_shard.state_dict import get_model_state_dict, set_model_state_dict

__all__ = [
    "HSDPCell",
    "HSDPModule",
    "HSDPParam",
    "ShardedState",
    "UnshardHandle",
    "fully_shard",
    "fully_shard_by_policy",
    "get_model_state_dict",
    "hsdp",
    "register_fsdp_forward_method",
    "set_model_state_dict",
    "share_comm_ctx",
]
