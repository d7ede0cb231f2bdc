"""Every strategy, by the name that the command line knows it by.

A new one is a class, and one line here; an all-reduce algorithm has its strategy as soon as it is registered.
"""

from __future__ import annotations

from torch_parallel.collectives import Collective
from torch_parallel.collectives.registry import when_registered
from torch_parallel.gradients.finite import NotFinite
from torch_parallel.strategies.all_reduce import ALL_REDUCE_STRATEGIES, AllReduce, FastestAllReduce, strategy_of
from torch_parallel.strategies.base import OptimizerFactory, Strategy
from torch_parallel.strategies.builtin import DataParallelStrategy, DistributedDataParallelStrategy
from torch_parallel.strategies.from_scratch import FromScratch
from torch_parallel.strategies.param_server import ParamServer
from torch_parallel.strategies.param_server_async import ParamServerAsync
from torch_parallel.strategies.param_server_backup import ParamServerBackup
from torch_parallel.strategies.param_server_bounded import ParamServerBounded
from torch_parallel.strategies.sharded import ShardedParamServer

FROM_SCRATCH: dict[str, type[FromScratch]] = {
    **ALL_REDUCE_STRATEGIES,
    "all_reduce": FastestAllReduce,
    "param_server": ParamServer,
    "sharded_param_server": ShardedParamServer,
}
BUILTIN: dict[str, type[Strategy]] = {
    "ddp": DistributedDataParallelStrategy,
    "data_parallel": DataParallelStrategy,
}
SYNCHRONOUS: dict[str, type[Strategy]] = {**FROM_SCRATCH, **BUILTIN}
"""Equal to one process, whatever the options."""
ASYNCHRONOUS: dict[str, type[FromScratch]] = {
    "param_server_async": ParamServerAsync,
    "param_server_bounded": ParamServerBounded,
    "param_server_backup": ParamServerBackup,
}
"""Not equal to one process, unless they are told to wait for everybody: --staleness 0, --backup_workers 0."""
STRATEGIES: dict[str, type[Strategy]] = {**SYNCHRONOUS, **ASYNCHRONOUS}


def _add_strategy(collective: Collective) -> None:
    name, strategy = strategy_of(collective.name)
    for strategies in (ALL_REDUCE_STRATEGIES, FROM_SCRATCH):
        strategies[name] = strategy
    for every in (SYNCHRONOUS, STRATEGIES):
        every[name] = strategy


when_registered(_add_strategy)

__all__ = [
    "ASYNCHRONOUS",
    "BUILTIN",
    "FROM_SCRATCH",
    "STRATEGIES",
    "SYNCHRONOUS",
    "AllReduce",
    "FromScratch",
    "NotFinite",
    "OptimizerFactory",
    "ParamServer",
    "ParamServerAsync",
    "ParamServerBackup",
    "ParamServerBounded",
    "ShardedParamServer",
    "Strategy",
]
