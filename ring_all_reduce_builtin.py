"""Control: torch's own DistributedDataParallel, in the plainest loop that trains as train.py does.

    python ring_all_reduce_builtin.py --n_gpus 2 --batch_size 64 --epochs 2

Same flags, data, seed, order, global batch and evaluation; none of the code that it is compared with. Its settings are
those that make it fastest here: gradients are views of the buckets, the graph is static, the optimizer is fused.
"""

import contextlib
import dataclasses
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from torch_parallel.results import ResultsError, RunFolder, environment
from torch_parallel.training.config import ConfigError, RunConfig, command_line_parser
from torch_parallel.training.evaluate import count_correct
from torch_parallel.workloads import DataError, Dataset, build_model, load_dataset

DDP_SETTINGS = {"gradient_as_bucket_view": True, "static_graph": True}
TIMED_EVERY = 100
"""DDP times its own exchange in one of so many steps."""
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def train_rank(rank: int, world_size: int, port: int, config: RunConfig, dataset: Dataset, folder: RunFolder) -> None:
    """One process: trains its replica on its share of every batch."""
    on_gpu = config.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.set_num_threads(threads(world_size))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size)
    dtype = getattr(torch, config.dtype)
    torch.manual_seed(config.seed)
    bare = build_model(config.model, dataset.image_shape, dataset.class_count).to(device, dtype)
    model = DistributedDataParallel(bare, device_ids=[rank] if on_gpu else None, **DDP_SETTINGS)
    optimizer = make_optimizer(bare, config)
    torch.manual_seed(config.seed + 1 + rank)  # dropout draws differ between the ranks
    count = len(dataset.train_targets)
    for epoch in range(1, config.epochs_on(dataset.name) + 1):
        generator = torch.Generator().manual_seed((config.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(count, generator=generator)
        loss_sum, update_s, start_s, first_s = 0.0, 0.0, time.perf_counter(), 0.0
        exchange_s = []
        for step, batch in enumerate(order.split(config.batch_size), start=1):
            mine = batch.tensor_split(world_size)[rank]
            inputs = dataset.normalize(dataset.train_inputs[mine].to(device), dtype)
            loss = cross_entropy(model(inputs), dataset.train_targets[mine].to(device), reduction="sum")
            optimizer.zero_grad()
            (loss * world_size / len(batch)).backward()  # DDP means over the ranks; this makes it over the samples
            update_start_s = time.perf_counter()
            optimizer.step()
            update_s += time.perf_counter() - update_start_s
            loss_sum += loss.detach()
            if epoch == 1 and not first_s:
                first_s = time.perf_counter() - start_s
            if step % TIMED_EVERY == 0:
                exchange_s.append(exposed_exchange_s(model))
        if on_gpu:
            torch.cuda.synchronize()
        train_s = time.perf_counter() - start_s
        for buffer in bare.buffers():
            dist.broadcast(buffer, 0)
        shard = torch.arange(len(dataset.test_targets)).tensor_split(world_size)[rank]
        tested = count_correct(
            bare, dataset.test_inputs[shard], dataset.test_targets[shard], lambda x: dataset.normalize(x, dtype), device
        )
        sums = torch.tensor([float(loss_sum), *tested], dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        if rank == 0:
            warm_up = config.batch_size if first_s and count > config.batch_size else 0
            rate = (count - warm_up) / (train_s - (first_s if warm_up else 0.0))
            losses = {"train_loss": sums[0].item() / count, "test_loss": sums[1].item() / sums[3].item()}
            losses["test_accuracy"] = sums[2].item() / sums[3].item()
            steps = -(-count // config.batch_size)
            exchanged_s = steps * statistics.median(exchange_s) if exchange_s else None
            record(folder, config, dataset, epoch, losses, train_s, rate, update_s, exchanged_s)
    if rank == 0:
        torch.save(bare.state_dict(), folder.path / "weights.pt")
    dist.barrier()
    dist.destroy_process_group()


def exposed_exchange_s(model: DistributedDataParallel) -> float:
    """Seconds of exchange, waiting included, outside of backward's computing, in the step that DDP timed last."""
    timed = model._get_ddp_logging_data()
    return (timed.get("backward_comm_time", 0) - timed.get("backward_compute_comm_overlap_time", 0)) / 1e9


def make_optimizer(model: torch.nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    options = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "fused": True}
    if config.optimizer == "sgd":
        options["momentum"] = config.momentum
    return OPTIMIZERS[config.optimizer](model.parameters(), **options)


def threads(world_size: int) -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else max(1, len(os.sched_getaffinity(0)) // world_size)


def record(
    folder: RunFolder,
    config: RunConfig,
    dataset: Dataset,
    epoch: int,
    losses: dict[str, float],
    train_s: float,
    samples_per_s: float,
    update_s: float,
    exchange_s: float | None,
) -> None:
    """A line on the screen and a row of runs.csv. DDP exchanges during backward, and itself times it now and then."""
    compute_s = train_s - update_s - (exchange_s or 0.0)
    parts = "compute and exchange" if exchange_s is None else f"exchange and wait {exchange_s:.2f} s  compute"
    print(
        f"epoch {epoch}/{config.epochs_on(dataset.name)}  train loss {losses['train_loss']:.4f}  "
        f"test accuracy {100 * losses['test_accuracy']:.2f} %  {samples_per_s:,.0f} samples/s  "
        f"{parts} {compute_s:.2f} s  update {update_s:.2f} s",
        flush=True,
    )
    names = ("model", "train_size", "test_size", "batch_size", "seed", "device", "dtype", "optimizer")
    row = {name: getattr(config, name) for name in names} | {"lr": config.learning_rate, "dataset": dataset.name}
    row |= {
        "strategy": "ddp",
        "kind": "measured",
        "n": config.n_gpus,
        "nodes": 1,
        "threads": threads(config.n_gpus or 1),
        "epoch": epoch,
    }
    row |= {"steps": -(-len(dataset.train_targets) // config.batch_size), "train_s": train_s, **losses}
    row |= {"samples_per_s": samples_per_s, "rank": 0, "role": "worker", "update_s": update_s}
    folder.append_rows([{**row, "compute_s": compute_s, "exchange_s": "" if exchange_s is None else exchange_s}])


def main() -> None:
    parser = command_line_parser(__doc__ or "")
    parser.add_argument("--port", type=int, default=0, help="TCP port of the process group (default: any free one)")
    options = vars(parser.parse_args())
    port = options.pop("port")
    config = RunConfig(**options)
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    on_gpu = config.device == "cuda" or (config.device == "auto" and gpus > 0)
    world_size = config.n_gpus or max(gpus, 2)
    if on_gpu and world_size > gpus:
        raise ConfigError(f"--n_gpus {world_size}: this machine has {gpus} GPUs; ask for fewer, or take --device cpu")
    dataset, line = load_dataset(config.dataset, config.data_dir, config.train_size, config.seed, config.test_size)
    device = "cuda" if on_gpu else "cpu"
    count = len(dataset.train_targets)
    config = dataclasses.replace(
        config, n_gpus=world_size, device=device, train_size=count, test_size=len(dataset.test_targets)
    )
    unsupported = ("resume", "clip_norm", "checkpoint_every", "check_replicas")
    changed = config.accumulate > 1 or config.lr_schedule != "constant" or config.aggregate != "weighted"
    if changed or any(getattr(config, name) for name in unsupported):
        raise ConfigError(
            f"this control has none of --{', --'.join(unsupported)}, --accumulate, --lr_schedule, --aggregate"
        )
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except (RuntimeError, dist.DistNetworkError):
        raise ConfigError(f"--port {port}: it is in use; take another, or leave --port out for any free one") from None
    folder = RunFolder(config.results_dir, f"ddp_{config.model}_{dataset.name}_n{world_size}")
    print(
        f"{line}\nDistributedDataParallel on {device}, {world_size} processes, {config.model}, batch of "
        f"{config.batch_size} over all; {DDP_SETTINGS}, fused {config.optimizer}",
        flush=True,
    )
    with folder.running(**environment(), config=dataclasses.asdict(config), strategy="ddp", settings=DDP_SETTINGS):
        mp.spawn(train_rank, (world_size, store.port, config, dataset, folder), nprocs=world_size)
    print(f"results in {folder.path}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        try:
            main()
        except (ConfigError, DataError, ResultsError) as error:
            print(f"ring_all_reduce_builtin.py: error: {error}", file=sys.stderr)
            sys.exit(2)
