"""Random models in random runs: each trains as in one process, or is refused by the name of what cannot be.

pytest tests/training/test_random_models.py --trials 2000 --first_trial 0
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import CLASSES, FEATURES, PARTS, Trial, make_trial
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel import Dataset, RunConfig, WorkerFailure, train
from torch_parallel.strategies import STRATEGIES, SYNCHRONOUS

EQUAL = [*SYNCHRONOUS, "param_server_bounded", "param_server_backup"]
"""The last two wait for everybody, unless they are told otherwise."""
LR = 0.02


def data_of(trial: Trial) -> Dataset:
    generator = torch.Generator().manual_seed(trial.number)
    sizes = [(size, FEATURES) for size in trial.sizes]
    inputs = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    targets = [torch.randint(CLASSES, (size,), generator=generator) for size in trial.sizes]
    return Dataset("made", inputs[0], targets[0], inputs[1], targets[1], CLASSES, (), (), "this test")


def in_one_process(trial: Trial, data: Dataset) -> tuple[nn.Module, float]:
    """A plain loop over whole batches; the model, and the mean training loss of the last epoch."""
    options = trial.options
    torch.manual_seed(options["seed"])
    model = trial.make_model().to(torch.float64) if not kept_types(trial) else widened(trial.make_model())
    parameters = [each for each in model.parameters() if each.requires_grad]
    more = {"momentum": 0.9} if options["optimizer"] == "sgd" else {}
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options["optimizer"]]
    optimizer = make(parameters, lr=LR, weight_decay=options["weight_decay"], **more)
    loss_sum = 0.0
    for epoch in range(1, options["epochs"] + 1):
        loss_sum = 0.0
        generator = torch.Generator().manual_seed(options["seed"] * 1_000_003 + epoch)
        for batch in torch.randperm(trial.sizes[0], generator=generator).split(options["batch_size"]):
            optimizer.zero_grad()
            loss = cross_entropy(model(data.train_inputs[batch]), data.train_targets[batch])
            loss.backward()
            if options["clip_norm"] is not None:
                nn.utils.clip_grad_norm_(parameters, options["clip_norm"])
            optimizer.step()
            loss_sum += loss.item() * len(batch)
        evaluate(model, data.test_inputs)
    return model, loss_sum / trial.sizes[0]


def evaluate(model: nn.Module, inputs: Tensor) -> None:
    """As a run does after each epoch: alone, a model may write its parameters then too."""
    training = [module for module in model.modules() if module.training]
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        model.eval()(inputs)
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            if not torch.equal(buffer, before):
                buffer.copy_(before)
    for module in training:
        module.training = True


def kept_types(trial: Trial) -> bool:
    return bool({"a type of its own", "complex buffer", "frozen complex"} & set(trial.parts))


def widened(model: nn.Module) -> nn.Module:
    """In float64 what was float32, and nothing else."""
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(wide.get(tensor.dtype, tensor.dtype))
    return model


def attempt(trial: Trial, folder: Path) -> str | None:
    """What is wrong, None where nothing is."""
    data = data_of(trial)
    before = [each.clone() for each in (data.train_inputs, data.test_inputs)]
    servers = STRATEGIES[trial.strategy].server_count
    config = RunConfig(
        n_gpus=trial.workers + servers,
        device="cpu",
        dtype="float64",
        lr=LR,
        deadline_s=60,
        results_dir=str(folder),
        **trial.options,
    )
    try:
        trained = train(config, make_model=trial.make_model, dataset=data, verbose=False)
    except WorkerFailure as failure:
        headline = str(failure).splitlines()[0]
        if trial.refusing and "UnsupportedModel" in headline and any(f" {n} " in headline for n in trial.refusing):
            return None
        return f"{'not refused by name' if trial.refusing else 'refused'}: {failure}"
    if trial.refusing:
        return f"not refused: {trial.refusing}"
    if not all(torch.equal(now, then) for now, then in zip((data.train_inputs, data.test_inputs), before, strict=True)):
        return "the data were written"
    model, loss = in_one_process(trial, data)
    if abs(trained.history[-1]["train_loss"] - loss) > 1e-9:
        return f"training loss {trained.history[-1]['train_loss']}, and {loss} in one process"
    return difference(trained.weights, model.state_dict())


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    if list(ours) != list(theirs):
        return f"keys {sorted(ours.keys() ^ theirs.keys())}"
    for name, value in theirs.items():
        if not isinstance(value, Tensor):
            if ours[name] != value:
                return f"{name}: {ours[name]} and {value}"
        elif ours[name].dtype != value.dtype or ours[name].shape != value.shape:
            return f"{name}: {ours[name].dtype} {ours[name].shape}, and {value.dtype} {value.shape} in one process"
        elif not torch.allclose(ours[name], value, rtol=1e-9, atol=1e-10):
            return f"{name}: {ours[name]} and {value}"
    return None


def test_every_model_is_that_of_one_process_or_refused_by_name(
    tmp_path: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    first, count = pytestconfig.getoption("first_trial"), pytestconfig.getoption("trials")
    with capsys.disabled():
        print(f"\nrandom models: --first_trial {first} --trials {count}", flush=True)
    wrong = {}
    for number in range(first, first + count):
        trial = make_trial(number, EQUAL)
        fault = attempt(copy.deepcopy(trial), tmp_path)
        if fault is not None:
            wrong[number] = f"{trial}\n{fault}"
    assert not wrong, f"{len(wrong)} of {count} from {first} on:\n" + "\n\n".join(wrong.values())


def test_every_part_and_strategy_is_drawn() -> None:
    trials = [make_trial(number, EQUAL) for number in range(2000)]
    assert {part for trial in trials for part in trial.parts} == set(PARTS)
    assert {trial.strategy for trial in trials} == set(EQUAL)
    refusing = sum(bool(trial.refusing) for trial in trials)
    assert 300 < refusing < 900
