"""Accumulation splits a step into micro-batches and changes nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_parallel import RunConfig, train
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.training import loop


def count_messages(communicator: Any, job: Any) -> dict[str, Any]:
    """`train_worker`, with the messages of gradients that this rank receives counted in what it returns."""
    counts: Counter = Counter()
    communicator.transport.observer = lambda each: counts.update([each.purpose])
    result = loop.Trainer(communicator, job).run()
    gradients = sum(count for purpose, count in counts.items() if purpose.startswith("gradients"))
    return {**result, "history": result.get("history", []), "weights": result.get("weights", {}), "messages": gradients}


@pytest.mark.parametrize("strategy", ("ring_all_reduce", "two_shot_in_place", "param_server", "sharded_param_server"))
@pytest.mark.exhaustive
def test_micro_batches_give_the_same_weights_and_no_more_messages(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """37 samples in batches of 10 on 2 workers, in up to 3 micro-batches: shards of 5, 5, 5 and 4 or 3 in the tail."""
    from torch_parallel.training import run as run_module

    results: dict[int, list] = {}
    launch = run_module.launch

    def keep(*arguments: Any, **options: Any) -> Any:
        returned = launch(*arguments, **options)
        results[accumulate] = returned
        return returned

    monkeypatch.setattr(run_module, "launch", keep)
    for accumulate in (1, 2, 3, 7):  # 7: more micro-batches than samples
        configuration = RunConfig(
            strategy=strategy,
            n_gpus=2 + FROM_SCRATCH[strategy].server_count,
            dataset="digits",
            train_size=37,
            batch_size=10,
            epochs=2,
            accumulate=accumulate,
            dtype="float64",
            device="cpu",
            results_dir=str(tmp_path),
        )
        train(configuration, verbose=False, worker_function=count_messages)
    first_worker = FROM_SCRATCH[strategy].server_count
    whole = results[1]
    messages = {"ring_all_reduce": 2 * 2, "two_shot_in_place": 2 * 2, "param_server": 2, "sharded_param_server": 2}
    assert sum(each["messages"] for each in whole) == messages[strategy] * 8  # steps
    for accumulate in (2, 3, 7):
        assert [each["messages"] for each in results[accumulate]] == [each["messages"] for each in whole]
        for name, value in whole[first_worker]["weights"].items():
            difference = torch.linalg.vector_norm(results[accumulate][first_worker]["weights"][name] - value)
            assert difference <= 1e-12 * torch.linalg.vector_norm(value), (accumulate, name)
