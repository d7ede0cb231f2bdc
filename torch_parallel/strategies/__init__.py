"""Every strategy, by the name that the command line knows it by.

A new one is a class, and one line here; an all-reduce algorithm has its strategy as soon as it is registered.
"""

from __future__ import annotations

from torch_parallel.strategies.all_reduce import ALL_REDUCE_STRATEGIES, AllReduce
from torch_parallel.strategies.base import NotFinite, OptimizerFactory, Strategy
from torch_parallel.strategies.param_server import ParamServer

STRATEGIES: dict[str, type[Strategy]] = {**ALL_REDUCE_STRATEGIES, "param_server": ParamServer}

__all__ = ["STRATEGIES", "AllReduce", "NotFinite", "OptimizerFactory", "ParamServer", "Strategy"]
