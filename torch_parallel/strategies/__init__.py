"""Every strategy, by the name that the command line knows it by. A new one is a class, and one line here."""

from __future__ import annotations

from torch_parallel.strategies.all_reduce import AllReduce, RingAllReduce
from torch_parallel.strategies.base import NotFinite, OptimizerFactory, Strategy
from torch_parallel.strategies.param_server import ParamServer

STRATEGIES: dict[str, type[Strategy]] = {
    "ring_all_reduce": RingAllReduce,
    "param_server": ParamServer,
}

__all__ = ["STRATEGIES", "AllReduce", "NotFinite", "OptimizerFactory", "ParamServer", "RingAllReduce", "Strategy"]
