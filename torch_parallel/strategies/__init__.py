"""Every strategy, by the name that the command line knows it by. A new one is a class, and one line here."""

from __future__ import annotations

from torch_parallel.strategies.all_reduce import AllReduce, RingAllReduce
from torch_parallel.strategies.base import FromScratch, NotFinite, OptimizerFactory, Strategy
from torch_parallel.strategies.builtin import DataParallelStrategy, DistributedDataParallelStrategy
from torch_parallel.strategies.param_server import ParamServer
from torch_parallel.strategies.sharded import ShardedParamServer

FROM_SCRATCH: dict[str, type[FromScratch]] = {
    "ring_all_reduce": RingAllReduce,
    "param_server": ParamServer,
    "sharded_param_server": ShardedParamServer,
}
BUILTIN: dict[str, type[Strategy]] = {
    "ddp": DistributedDataParallelStrategy,
    "data_parallel": DataParallelStrategy,
}
STRATEGIES: dict[str, type[Strategy]] = {**FROM_SCRATCH, **BUILTIN}

__all__ = [
    "BUILTIN",
    "FROM_SCRATCH",
    "STRATEGIES",
    "AllReduce",
    "FromScratch",
    "NotFinite",
    "OptimizerFactory",
    "ParamServer",
    "RingAllReduce",
    "ShardedParamServer",
    "Strategy",
]
