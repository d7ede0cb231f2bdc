"""Every model by name trains as in one process, for each of its tasks and under every synchronous strategy."""

from __future__ import annotations

import csv
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from small_models import (
    BATCH,
    CASES,
    EPOCHS,
    IMAGE_CASES,
    TEST_SIZE,
    TEXT_CASES,
    TRAIN_SIZE,
    WORKERS,
    Case,
    options,
    small_workload,
)
from torch import Tensor, nn

from torch_parallel import RunConfig, Workload, fork_server, launch
from torch_parallel.communicator import Communicator
from torch_parallel.results import RunFolder
from torch_parallel.strategies import STRATEGIES, SYNCHRONOUS
from torch_parallel.training.job import Job, make_job
from torch_parallel.training.loop import Trainer
from torch_parallel.training.sampler import epoch_order
from torch_parallel.workloads.tree import Tree

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {"texts": TEXT_CASES, "images": IMAGE_CASES}
IMPORTED = [
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "distilbert", "gpt2", "vit")),
    "torchvision.models",
]
"""By the fork server, once: it takes each worker some seconds."""


class Reference(NamedTuple):
    workload: Workload
    weights: dict[str, Tensor]
    train_losses: list[float]
    test_losses: list[float]


@pytest.fixture(scope="module")
def prepared() -> Iterator[None]:
    """A server that has imported what the models are made of; and one thread, for the layers are small."""
    fork_server.kill()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "PRELOAD", [*fork_server.PRELOAD, *IMPORTED])
        fork_server.start()
        yield
    torch.set_num_threads(threads)
    fork_server.kill()


@pytest.fixture(scope="module")
def one_process(prepared: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """What a model comes to in one process, worked out when it is first asked for."""
    folder, known = tmp_path_factory.mktemp("texts"), {}

    def reference(name: str) -> Reference:
        if name not in known:
            known[name] = in_one_process(CASES[name], small_workload(CASES[name], folder))
        return known[name]

    return reference


def in_one_process(case: Case, workload: Workload) -> Reference:
    """A plain loop: the mean of the losses of all targets of a step, whoever would have had them."""
    torch.manual_seed(0)
    model = workload.make_model().to(torch.float64)
    optimizer = {
        "sgd": lambda each: torch.optim.SGD(each, lr=case.lr, momentum=0.9),
        "adamw": lambda each: torch.optim.AdamW(each, lr=case.lr, weight_decay=0.0),
    }[case.optimizer](model.parameters())
    train_losses, test_losses = [], []
    for epoch in range(1, EPOCHS + 1):
        sums = []
        for step in epoch_order(TRAIN_SIZE, 0, epoch).split(BATCH):
            losses = losses_of(case.data, model, workload, workload.samples.train, step)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            sums.append(losses.detach())
        train_losses.append(torch.cat(sums).mean().item())
        with torch.no_grad():
            test = workload.samples.test
            losses = losses_of(case.data, model, workload, test, torch.arange(TEST_SIZE))
        test_losses.append(losses.mean().item())
    return Reference(workload, model.state_dict(), train_losses, test_losses)


def losses_of(data: str, model: nn.Module, workload: Workload, part: Tree, rows: Tensor) -> Tensor:
    """Of each target of these samples. Texts go through the model one by one, without what they are filled up with."""
    if data == "images":
        task: Any = workload.task
        pixels = part["inputs"][rows].double() / 255
        output = model((pixels - task.mean[0]) / task.std[0])
        return of_targets(getattr(output, "logits", output), part["targets"][rows])
    found = []
    for row in rows.tolist():
        tokens = part["tokens"][row].long()
        if data == "next tokens":
            wanted = tokens[1:].clone()
            wanted[part["count"][row] :] = -100
            tokens = tokens[:-1]
        else:
            tokens = tokens[: int(part["mask"][row].sum())]
            wanted = part["targets"][row][: len(tokens)] if data == "hidden tokens" else part["targets"][row : row + 1]
        logits = model(tokens[None]).logits[0]
        found.append(of_targets(logits.reshape(len(wanted), -1), wanted))
    return torch.cat(found)


def of_targets(logits: Tensor, wanted: Tensor) -> Tensor:
    places = (wanted >= 0).nonzero().flatten()
    return -torch.log_softmax(logits[places], 1)[torch.arange(len(places)), wanted[places]]


def configured(case: Case, strategy: str) -> RunConfig:
    """Several buckets, and all replicas compared after every step."""
    more = {} if strategy == "data_parallel" else {"accumulate": case.accumulate}
    n = WORKERS + STRATEGIES[strategy].server_count
    where: dict[str, Any] = {"strategy": strategy, "n_gpus": n, "device": "cpu", "deadline_s": 60}
    return RunConfig(**where, **options(case), **more, check_replicas=1, bucket_mb=0.05)


def train_all(communicator: Communicator, jobs: dict[str, tuple[Job, dict[str, Tensor]]]) -> dict[str, dict[str, Any]]:
    """One run after the other in the same processes, which costs less than to start them each time."""
    results = {}
    for name, (job, tensors) in jobs.items():
        communicator.shared = tensors
        try:
            results[name] = Trainer(communicator, job).run()
        except Exception as error:
            error.add_note(f"in the run of {name}")
            raise
    return results


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # DDP's, which adds them right
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, "param_server_bounded", "param_server_backup"])
def test_every_model_trains_as_in_one_process(
    strategy: str, group: str, one_process: Callable[[str], Reference]
) -> None:
    jobs, cases = {}, GROUPS[group]
    for name, case in cases.items():
        workload = one_process(name).workload
        jobs[name] = make_job(configured(case, strategy), workload.task, workload.samples, workload.make_model)
    servers = STRATEGIES[strategy].server_count
    processes = configured(cases[next(iter(cases))], strategy).process_count
    results = launch(train_all, processes, jobs, server_count=servers, threads=1, deadline_s=60)
    wrong = [f"{name}: {fault}" for name in cases for fault in differences(results[servers][name], one_process(name))]
    assert not wrong


def differences(result: dict[str, Any], reference: Reference) -> list[str]:
    """What is not as in one process, in words."""
    found = []
    assert result["weights"].keys() == reference.weights.keys()
    for name, wanted in reference.weights.items():
        difference = float((result["weights"][name] - wanted).double().norm())
        if not difference <= 1e-12 * max(float(wanted.double().norm()), 1e-3):
            found.append(f"{name} by {difference:.1e}")
    for key, losses in (("train_loss", reference.train_losses), ("test_loss", reference.test_losses)):
        if [epoch[key] for epoch in result["history"]] != pytest.approx(losses, rel=1e-10):
            found.append(key)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", ["ring_all_reduce_builtin.py", "param_server_builtin.py"])
@pytest.mark.parametrize("name", ["bert of hidden tokens", "resnet50"])
def test_so_does_a_control(script: str, name: str, one_process: Callable[[str], Reference], tmp_path: Path) -> None:
    """What the scripts train by, in processes that are prepared: of its own each would import for many seconds."""
    reference, n = one_process(name), WORKERS
    config = RunConfig(n_gpus=n, device="cpu", results_dir=str(tmp_path), **options(CASES[name]))
    folder = RunFolder(str(tmp_path), "control")
    if script == "param_server_builtin.py":
        runpy.run_path(str(ROOT / script))["train"](config, reference.workload, folder)
    else:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        launch(ddp_rank, n, script, store.port, config, reference.workload, folder, threads=1, deadline_s=60)
    with open(folder.path / "runs.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    history = [{key: float(row[key]) for key in ("train_loss", "test_loss")} for row in rows]
    assert not differences({"weights": torch.load(folder.path / "weights.pt"), "history": history}, reference)


def ddp_rank(communicator: Communicator, script: str, port: int, *arguments: Any) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    train_rank = runpy.run_path(str(ROOT / script))["train_rank"]
    train_rank(communicator.rank, communicator.world_size, store, 1, *arguments)
