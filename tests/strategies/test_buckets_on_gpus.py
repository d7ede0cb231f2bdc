"""Several buckets that leave during backward on a stream of their own, and one, which needs none: on GPUs, of which
processes share one where there are fewer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torch_parallel import Communicator, WorkerFailure, launch
from torch_parallel.strategies import FROM_SCRATCH

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU"),
    pytest.mark.parametrize("bucket_bytes", [16, 1 << 20], ids=["two buckets", "one bucket"]),
    pytest.mark.parametrize("performer", ["plain", "triton"]),
    pytest.mark.parametrize("name", ["ring_all_reduce", "two_shot_in_place", "param_server"]),
]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor([12.0], dtype=torch.float64))


def one_rank(communicator: Communicator, name: str, steps: int, bad: tuple[int, int], options: Any) -> dict[str, Any]:
    """Half the sum of the parameters' squares, times NaN for b on worker `bad[0]` in step `bad[1]`."""
    model = TwoLayers().to(communicator.device)
    strategy = FROM_SCRATCH[name](
        model,
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.5, fused=True),
        communicator,
        overlap=True,
        **options,
    )
    several = len(strategy.buckets) > 1
    assert several == (options["bucket_bytes"] == 16) and (strategy._pipeline.stream is not None) == several
    for step in range(steps):
        strategy.begin_step()
        if communicator.worker_index is not None:
            factor = torch.nan if (communicator.worker_index, step) == bad else 1.0
            with strategy.synchronising(last=True):
                (((model.a**2).sum() + factor * (model.b**2).sum()) / 2 / communicator.worker_count).backward()
        strategy.step()
    strategy.confirm()
    return {"a": model.a.tolist(), "b": model.b.tolist(), "norm": strategy.last_norm, "skipped": strategy.skipped_steps}


def run(name: str, performer: str, steps: int, bad: tuple[int, int] = (-1, -1), **options: Any) -> list[dict[str, Any]]:
    servers = FROM_SCRATCH[name].server_count
    where = {"device": "cuda", "performer": performer, "deadline_s": 60, "server_count": servers}
    return launch(one_rank, 2 + servers, name, steps, bad, options, **where)


def test_each_step_takes_half(name: str, performer: str, bucket_bytes: int) -> None:
    """The gradient is the parameter itself, and the learning rate 1/2."""
    for held in run(name, performer, 3, bucket_bytes=bucket_bytes):
        assert held["a"] == [3 / 8, 4 / 8] and held["b"] == [12 / 8]


def test_the_norm_is_over_all_buckets(name: str, performer: str, bucket_bytes: int) -> None:
    """Of [3, 4] and [12] it is 13, so a clip to 1.3 scales by a tenth, and half of that is taken off."""
    for held in run(name, performer, 1, clip_norm=1.3, bucket_bytes=bucket_bytes):
        assert held["a"] == pytest.approx([3 - 0.15, 4 - 0.2], abs=1e-6)
        assert held["b"] == pytest.approx([12 - 0.6], abs=1e-6)


def test_a_step_that_is_not_finite_is_skipped_by_all(name: str, performer: str, bucket_bytes: int) -> None:
    for held in run(name, performer, 3, bad=(1, 1), skip_not_finite=True, bucket_bytes=bucket_bytes):
        assert held["a"] == [3 / 4, 4 / 4] and held["b"] == [12 / 4]


@pytest.mark.parametrize("step", [1, 2], ids=["found in the next step", "found at the end"])
def test_or_the_run_ends_and_says_whose(name: str, performer: str, bucket_bytes: int, step: int) -> None:
    worker = 1 + FROM_SCRATCH[name].server_count
    with pytest.raises(WorkerFailure, match=f"rank {worker} failed: NotFinite: the gradient of b is NaN or infinite"):
        run(name, performer, 3, bad=(1, step), bucket_bytes=bucket_bytes)
