"""Control: torch's own DataParallel, in the plainest loop that trains as train.py does.

    python param_server_builtin.py --n_gpus 2 --batch_size 64 --epochs 2

One process feeds all GPUs: it splits each batch, copies the model to every GPU in each step, and gathers outputs and
gradients on GPU 0. Without GPUs torch.nn.DataParallel runs the plain module in one process, and so does this script.
Same flags, data, seed, order, global batch and evaluation as train.py; none of the code that it is compared with.
"""

import dataclasses
import math
import os
import signal
import sys
import time

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large tensors in huge pages, as in train.py's workers

import torch

from torch_parallel.results import OutputError, ResultsError, RunFolder, environment, prepare_streams
from torch_parallel.training.config import CONTROL_FLAGS, ConfigError, RunConfig, command_line_parser
from torch_parallel.training.evaluate import (
    Diverged,
    FromTheStart,
    evaluate,
    first_not_finite,
    metric_columns,
    moment,
    seconds_between,
    step_targets,
    tested_words,
)
from torch_parallel.workloads import DataError
from torch_parallel.workloads.load import load_workload
from torch_parallel.workloads.outputs import OutputMisfit
from torch_parallel.workloads.task import loss_sum_of
from torch_parallel.workloads.tree import rows, to
from torch_parallel.workloads.trial import try_out
from torch_parallel.workloads.whole_model import hidden, in_type, left_as_it_is, of_sparse_gradients, state_on_cpu
from torch_parallel.workloads.workload import Workload

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def train(config: RunConfig, workload: Workload, folder: RunFolder) -> None:
    device = torch.device(config.device)
    dtype = getattr(torch, config.dtype)
    torch.manual_seed(config.seed)
    bare, task, samples = in_type(workload.make_model().to(device), dtype), workload.task, workload.samples
    if fault := hidden(bare) or of_sparse_gradients(bare):
        raise OutputMisfit(fault)
    try_out(bare, task, samples.train, dtype, device)
    model = torch.nn.DataParallel(bare, list(range(config.n_gpus or 1)) if device.type == "cuda" else None)
    options = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    options |= {"momentum": config.momentum} if config.optimizer == "sgd" else {}
    optimizer = OPTIMIZERS[config.optimizer](bare.parameters(), **options)
    optimized, made_so = [(list(bare.named_parameters()), optimizer)], FromTheStart(bare)
    torch.manual_seed(config.seed * 1_000_003 + 7919)  # as the first rank of train.py
    train_samples, on_gpu = to(samples.train, device), device.type == "cuda"
    for epoch, size in enumerate(config.epoch_sizes(samples.train_size), start=1):
        generator = torch.Generator().manual_seed((config.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(samples.train_size, generator=generator)[:size]
        targets = step_targets(task, samples.train, order, config.batch_size)
        loss_sum, updates, warm_up, start_s = 0.0, [], (0.0, 0), time.perf_counter()
        for whole, total in zip(order.to(device).split(config.batch_size), targets, strict=True):
            batch = task.prepare(rows(train_samples, whole), dtype)
            # taken outside the module, on the gathered outputs: a mean over targets, however samples were split
            loss = loss_sum_of(task, task.forward(model, batch), batch)
            optimizer.zero_grad()
            (loss / max(1, total)).backward()
            update_start = moment(device)
            optimizer.step()
            updates.append((update_start, moment(device)))
            loss_sum += loss.detach()
            if epoch == 1 and not warm_up[1] and size > len(whole):
                if on_gpu:
                    torch.cuda.synchronize()
                warm_up = (time.perf_counter() - start_s, len(whole))
        if on_gpu:
            torch.cuda.synchronize()
        train_s, update_s = time.perf_counter() - start_s, sum(seconds_between(*update) for update in updates)
        start_s = time.perf_counter()
        with left_as_it_is(bare):
            tested = evaluate(bare, task, samples.test, dtype, device)
        test_s = time.perf_counter() - start_s
        metrics = tested.metrics(task)
        train_loss, accuracy = float(loss_sum) / sum(targets), metrics.get("accuracy", math.nan)
        losses = {"training loss": train_loss, "test loss": tested.loss}
        if fault := first_not_finite(bare, optimized, losses, made_so):
            raise Diverged(fault, epoch)
        rate = (size - warm_up[1]) / (train_s - warm_up[0])
        print(
            f"epoch {epoch}/{config.epochs}  train loss {train_loss:.4f}  "
            f"{tested_words(accuracy, tested.loss)}  {rate:,.0f} samples/s  "
            f"compute and exchange {train_s - update_s:.2f} s  update {update_s:.2f} s",
            flush=True,
        )
        row = config.columns(samples.name, workload.model_name) | {
            "strategy": "data_parallel",
            "workers": 1,
            "rank": 0,
            "role": "worker",
        }
        row |= {"threads": torch.get_num_threads(), "epoch": epoch}
        row |= {"steps": -(-size // config.batch_size), "train_s": train_s, "samples_per_s": rate}
        row |= {"train_loss": train_loss, "test_loss": tested.loss}
        row |= metric_columns(metrics) | {"test_s": test_s, "test_samples_per_s": samples.test_size / test_s}
        row |= {"test_accuracy": accuracy, "compute_s": train_s - update_s, "update_s": update_s}
        folder.append_rows([row])
    torch.save(state_on_cpu(bare), folder.path / "weights.pt")


def main() -> None:
    config = RunConfig(**vars(command_line_parser(__doc__ or "", CONTROL_FLAGS).parse_args()))
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    device = "cuda" if config.device == "cuda" or gpus else "cpu"
    n = config.n_gpus or max(gpus, 1 if device == "cuda" else 2)
    if device == "cuda" and n > gpus:
        raise ConfigError(f"--n_gpus {n}: this machine has {gpus} GPUs; ask for fewer, or take --device cpu")
    workload, line = load_workload(config.choice)
    samples = workload.samples
    config = dataclasses.replace(config, n_gpus=n, device=device)
    config = config.resolved(samples.known_as, samples.train_size, samples.test_size)
    folder = RunFolder(config.results_dir, f"data_parallel_{workload.model_name}_{samples.name}_n{n}")
    how = "no GPU: the plain module in one process, whatever --n_gpus" if device == "cpu" else f"{n} GPUs"
    print(f"{line}\nDataParallel, {how}; {workload.model_name}, batch of {config.batch_size}", flush=True)
    here = environment()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(here["machine"]["usable_processors"])
    with folder.running(**here, config=dataclasses.asdict(config), strategy="data_parallel"):
        train(config, workload, folder)
    print(f"results in {folder.path}")


if __name__ == "__main__":
    prepare_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores the second
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    code, said = 0, ""
    try:
        main()
    except (ConfigError, DataError, ResultsError) as error:
        code, said = 2, f"error: {error}"
    except (Diverged, OutputError, OutputMisfit) as error:
        code, said = 1, str(error)
    except KeyboardInterrupt:
        code, said = 130, "interrupted"
    if said:
        print(f"param_server_builtin.py: {said}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what `| head` has not read is not tried once more
    sys.exit(code)
