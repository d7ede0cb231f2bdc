"""Control: torch's own DistributedDataParallel, in the plainest loop that trains as train.py does.

    python ring_all_reduce_builtin.py --n_gpus 2 --batch_size 64 --epochs 2

Same flags, data, seed, order, global batch and evaluation; none of the code that it is compared with. Its settings are
those that torch documents as saving time: gradients are views of the buckets, the graph is static, the optimizer is
fused, and BatchNorm's statistics are each rank's own until they are evaluated.
"""

import dataclasses
import datetime
import inspect
import json
import math
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import statistics
import sys
import time
import traceback
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large tensors in huge pages, as in train.py's workers

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from torch_parallel.results import OutputError, ResultsError, RunFolder, environment, prepare_streams
from torch_parallel.training.config import CONTROL_FLAGS, ConfigError, RunConfig, command_line_parser
from torch_parallel.training.evaluate import (
    Diverged,
    Evaluation,
    FromTheStart,
    evaluate,
    first_not_finite,
    metric_columns,
    moment,
    seconds_between,
    step_targets,
    tested_words,
)
from torch_parallel.training.network import check_network
from torch_parallel.workloads import DataError
from torch_parallel.workloads.load import load_workload
from torch_parallel.workloads.outputs import OutputMisfit
from torch_parallel.workloads.task import loss_sum_of
from torch_parallel.workloads.tree import rows, to
from torch_parallel.workloads.trial import try_out
from torch_parallel.workloads.whole_model import (
    digests,
    hidden,
    in_type,
    left_as_it_is,
    of_sparse_gradients,
    state_on_cpu,
)
from torch_parallel.workloads.workload import Workload

NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
DDP_SETTINGS = {"gradient_as_bucket_view": True, "static_graph": True}
DDP_SETTINGS |= {"forward_sync_buffers" if NEW_NAME else "broadcast_buffers": False}
TIMED_EVERY = 10
"""DDP times its own exchange in one of so many steps; torch's default is 100."""
FEWEST_TIMED = 5
"""With fewer steps timed in an epoch its exchange is not told apart."""
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}

LAST_WORDS_S = 0.3
"""After the end of a first rank, the time in which it shows who ended before."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Only the launcher acts on these, which reach every process of a terminal, until a rank is ready for them."""


class RankFailed(Exception):
    """A rank ended before it had finished. The message names it and says why."""


def train_rank(
    rank: int,
    world_size: int,
    store: dist.Store,
    threads: int,
    config: RunConfig,
    workload: Workload,
    folder: RunFolder,
) -> None:
    """One process: trains its replica on its share of every batch. Raises Diverged."""
    on_gpu = config.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(threads)
    deadline = datetime.timedelta(seconds=config.deadline_s)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=deadline)
    dtype = getattr(torch, config.dtype)
    torch.manual_seed(config.seed)
    bare, task, samples = in_type(workload.make_model().to(device), dtype), workload.task, workload.samples
    if fault := hidden(bare) or of_sparse_gradients(bare):
        raise OutputMisfit(fault)
    try_out(bare, task, samples.train, dtype, device)
    model = DistributedDataParallel(bare, device_ids=[rank] if on_gpu else None, **DDP_SETTINGS)
    model._set_ddp_runtime_logging_sample_rate(TIMED_EVERY)
    options = {"momentum": config.momentum} if config.optimizer == "sgd" else {}
    optimizer = OPTIMIZERS[config.optimizer](
        bare.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True, **options
    )
    optimized, made_so = [(list(bare.named_parameters()), optimizer)], FromTheStart(bare)
    torch.manual_seed(config.seed * 1_000_003 + 7919 * (rank + 1))  # dropout draws differ between the ranks
    train_samples = to(samples.train, device)
    shard = torch.arange(samples.test_size).tensor_split(world_size)[rank]
    test_samples = rows(samples.test, shard)
    for epoch, size in enumerate(config.epoch_sizes(samples.train_size), start=1):
        generator = torch.Generator().manual_seed((config.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(samples.train_size, generator=generator)[:size]
        targets = step_targets(task, samples.train, order, config.batch_size)
        loss_sum, updates, exchange_s, warm_up, start_s = 0.0, [], [], (0.0, 0), time.perf_counter()
        for step, whole in enumerate(order.to(device).split(config.batch_size), start=1):
            mine = whole.tensor_split(world_size)[rank]
            # DDP waits for every rank, and many models take no empty batch: without samples, one that counts nothing
            batch = task.prepare(rows(train_samples, mine if len(mine) else whole[:1]), dtype)
            with torch.random.fork_rng([device] if on_gpu else [], enabled=not len(mine)):
                loss = loss_sum_of(task, task.forward(model, batch), batch) * (len(mine) > 0)
            optimizer.zero_grad()
            # DDP means over the ranks; this makes it over the targets
            (loss * world_size / max(1, targets[step - 1])).backward()
            update_start = moment(device)
            optimizer.step()
            updates.append((update_start, moment(device)))
            loss_sum += loss.detach()
            if epoch == step == 1 and size > len(whole):
                if on_gpu:
                    torch.cuda.synchronize()
                warm_up = (time.perf_counter() - start_s, len(whole))
            if step % TIMED_EVERY == 0:
                exchange_s.append(exposed_exchange_s(model))
        if on_gpu:
            torch.cuda.synchronize()
        train_s = time.perf_counter() - start_s
        for buffer in bare.buffers():
            dist.broadcast(buffer, 0)
        parts: list[Any] = [None] * world_size
        bits, start_s = digests(bare), time.perf_counter()
        with left_as_it_is(bare):
            own = evaluate(bare, task, test_samples, dtype, device)
        dist.all_gather_object(parts, (float(loss_sum), own, bits))
        train_loss = sum(loss for loss, _, _ in parts) / sum(targets)
        tested, test_s = sum((each for _, each, _ in parts), Evaluation()), time.perf_counter() - start_s
        for name in bits:
            if len({of_rank[name] for _, _, of_rank in parts}) > 1:
                raise OutputMisfit(
                    f"parameter {name} is not the same on all ranks after epoch {epoch}: forward writes it"
                )
        losses = {"training loss": train_loss, "test loss": tested.loss}
        if fault := first_not_finite(bare, optimized, losses, made_so):
            raise Diverged(fault, epoch)
        if rank == 0:
            row = {"epoch": epoch, "steps": -(-size // config.batch_size), "train_s": train_s}
            row["update_s"] = sum(seconds_between(*update) for update in updates)
            row |= {"samples_per_s": (size - warm_up[1]) / (train_s - warm_up[0]), "train_loss": train_loss}
            metrics = tested.metrics(task)
            row |= {"test_loss": tested.loss, "test_accuracy": metrics.get("accuracy", math.nan)}
            row |= metric_columns(metrics) | {"test_s": test_s, "test_samples_per_s": samples.test_size / test_s}
            timed = len(exchange_s) >= FEWEST_TIMED
            row["exchange_s"] = row["steps"] * statistics.fmean(exchange_s) if timed else ""
            row["compute_s"] = train_s - row["update_s"] - (row["exchange_s"] or 0.0)
            record({**row, "threads": threads}, exchange_s, config, workload, folder)
    if rank == 0:
        torch.save(state_on_cpu(bare), folder.path / "weights.pt")
    dist.barrier(device_ids=[rank] if on_gpu else None)
    dist.destroy_process_group()


def rank_main(rank: int, world_size: int, port: int, *arguments: Any) -> None:
    """A rank from its start to its end. Whether it has finished, or what went wrong, it tells the launcher's store.

    Its exit code would not do: torch takes a rank that ends early with 0 for one that has finished.
    """
    prepare_streams()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        try:
            train_rank(rank, world_size, store, *arguments)
        except Exception as error:
            words = str(error)
            if not isinstance(error, Diverged | OutputError | OutputMisfit):  # else these say all
                words = f"{type(error).__name__}: {error}\n\n{traceback.format_exc().rstrip()}"
            store.set(f"words {store.add('words', 1)}", json.dumps([rank, words]))
            os._exit(1)  # at once: its peers learn of it
        store.set(f"finished {rank}", "")
    except Exception:  # the launcher does not answer
        traceback.print_exc()
        os._exit(1)


def run_ranks(n: int, store: dist.TCPStore, *arguments: Any) -> None:
    """Starts the ranks and returns when all have finished. Raises RankFailed; however it ends, no rank is left."""
    multiprocessing.resource_tracker.ensure_running()  # whose start would take the mask away
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    context = mp.spawn(rank_main, (n, store.port, *arguments), nprocs=n, join=False, daemon=True)
    ranks = dict(enumerate(context.processes))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        while ranks:
            multiprocessing.connection.wait([process.sentinel for process in ranks.values()])
            ended = [rank for rank, process in ranks.items() if process.exitcode is not None]
            if any(ranks[rank].exitcode or not store.check([f"finished {rank}"]) for rank in ended):
                raise RankFailed(who_failed(ranks, store))
            for rank in ended:
                del ranks[rank]
    finally:
        for process in ranks.values():
            process.kill()
        for process in ranks.values():
            process.join()


def who_failed(ranks: dict[int, Any], store: dist.TCPStore) -> str:
    """The rank that ended without a word, which is why its peers failed; else the first that said why it did."""
    time.sleep(LAST_WORDS_S)
    keys = [f"words {number}" for number in range(1, store.add("words", 0) + 1)]
    by_rank = dict(json.loads(store.get(key)) for key in keys if store.check([key]))  # one may have died in between
    for rank, process in ranks.items():
        code, finished = process.exitcode, store.check([f"finished {rank}"])
        if rank not in by_rank and code is not None and not (code == 0 and finished):
            if code >= 0:
                return f"rank {rank} ended with exit code {code}{'' if finished else ' before it had finished'}"
            return f"rank {rank} was killed by signal {-code} ({signal.strsignal(-code)})"
    rank, words = next(iter(by_rank.items()))
    return f"rank {rank} failed: {words}"


def exposed_exchange_s(model: DistributedDataParallel) -> float:
    """Seconds of exchange, waiting included, outside of backward's computing, in the step that DDP timed last."""
    timed = model._get_ddp_logging_data()
    return (timed["backward_comm_time"] - timed["backward_compute_comm_overlap_time"]) / 1e9


def threads_each(world_size: int, processors: int) -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else max(1, processors // world_size)


def record(row: dict, exchange_s: list[float], config: RunConfig, workload: Workload, folder: RunFolder) -> None:
    """A line on the screen and a row of runs.csv. DDP exchanges during backward, and itself times some steps of it."""
    parts = "compute and exchange"
    if row["exchange_s"]:
        low, _, high = (row["steps"] * quartile for quartile in statistics.quantiles(exchange_s, n=4))
        sampled = f"{low:.2f} to {high:.2f} by the quartiles of {len(exchange_s)} steps timed"
        parts = f"exchange and wait {row['exchange_s']:.2f} s ({sampled})  compute"
    print(
        f"epoch {row['epoch']}/{config.epochs}  train loss {row['train_loss']:.4f}  "
        f"{tested_words(row['test_accuracy'], row['test_loss'])}  {row['samples_per_s']:,.0f} samples/s  "
        f"{parts} {row['compute_s']:.2f} s  update {row['update_s']:.2f} s",
        flush=True,
    )
    same = config.columns(workload.samples.name, workload.model_name) | {
        "strategy": "ddp",
        "workers": config.n_gpus,
        "rank": 0,
        "role": "worker",
    }
    options = json.dumps({**DDP_SETTINGS, "timed_every": TIMED_EVERY})
    folder.append_rows([{**same, "options": options, **row}])


def main() -> None:
    parser = command_line_parser(__doc__ or "", CONTROL_FLAGS)
    parser.add_argument("--port", type=int, default=0, help="TCP port of the process group; 0 is any free one")
    options = vars(parser.parse_args())
    port = options.pop("port")
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port}: ports go from 0, any free one, to 65535")
    config = RunConfig(**options)
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    enough = gpus >= (2 if config.n_gpus is None else 1)  # one GPU alone has nobody to exchange with
    device = "cuda" if config.device == "cuda" or enough else "cpu"
    n = config.n_gpus or max(gpus, 2)
    if device == "cuda" and n > gpus:
        raise ConfigError(f"--n_gpus {n}: this machine has {gpus} GPUs; ask for fewer, or take --device cpu")
    instead = "take python train.py, whose strategies from scratch need no network"
    check_network("DistributedDataParallel", instead, device)
    workload, line = load_workload(config.choice)
    samples = workload.samples
    config = dataclasses.replace(config, n_gpus=n, device=device)
    config = config.resolved(samples.known_as, samples.train_size, samples.test_size)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except (RuntimeError, dist.DistNetworkError):
        raise ConfigError(f"--port {port}: it is in use; take another, or leave --port out for any free one") from None
    folder = RunFolder(config.results_dir, f"ddp_{workload.model_name}_{samples.name}_n{n}")
    print(
        f"{line}\nDistributedDataParallel on {device}, {n} processes, {workload.model_name}, batch of "
        f"{config.batch_size} over all; {DDP_SETTINGS}, fused {config.optimizer}",
        flush=True,
    )
    here = environment()
    threads = threads_each(n, here["machine"]["usable_processors"])
    with folder.running(**here, config=dataclasses.asdict(config), strategy="ddp", settings=DDP_SETTINGS):
        run_ranks(n, store, threads, config, workload, folder)
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
    except (RankFailed, OutputError) as error:
        code, said = 1, str(error)
    except KeyboardInterrupt:
        code, said = 130, "interrupted"
    if said:
        print(f"ring_all_reduce_builtin.py: {said}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what `| head` has not read is not tried once more
    sys.exit(code)
