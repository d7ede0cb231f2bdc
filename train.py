"""Trains a model on several processes that exchange gradients: `python train.py --strategy ring_all_reduce --n_gpus 4`.

`python train.py --help` lists every flag; `python train.py` alone trains with the ring on all GPUs, or on the CPU.
"""

import math

from torch_parallel.command_line import run_command, start_command

if __name__ == "__main__":
    start_command()  # before the imports below, which take as long as those of the server that it starts

from torch_parallel.training.config import RunConfig
from torch_parallel.training.run import train


def main() -> None:
    config = RunConfig.from_command_line(description=__doc__)
    run = train(config)
    accuracy = "" if math.isnan(run.test_accuracy) else f"test accuracy {100 * run.test_accuracy:.2f} %; "
    if run.rank == 0:
        print(f"{accuracy}weights in {run.weights_file}; results in {run.folder}")


if __name__ == "__main__":
    run_command("train.py", main)
