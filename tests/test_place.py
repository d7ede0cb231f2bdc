"""Who this process is, as torchrun, srun, mpirun or a user tell it by the environment."""

from __future__ import annotations

import pytest

from torch_parallel.place import Place, RendezvousError, place_of

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MEETING}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    **MEETING,
}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", **MEETING}


@pytest.mark.parametrize(("starter", "environ"), [("torchrun", TORCHRUN), ("mpirun", MPIRUN), ("srun", SRUN)])
def test_each_of_them_says_it_in_its_own_words(starter: str, environ: dict[str, str]) -> None:
    assert place_of(environ) == Place(3, 4, "127.0.0.1", 29500, starter)


def test_by_hand_the_rank_within_the_node_may_be_left_out() -> None:
    assert place_of({"RANK": "0", "WORLD_SIZE": "1", **MEETING}) == Place(0, 1, "127.0.0.1", 29500, "torchrun")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        MEETING,  # which a shell may have for other programs
        {"WORLD_SIZE_OF_MINE": "3"},
        # a batch script, which is one process, whatever was asked for
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"},  # the shell of srun --pty
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_process_that_was_started_alone(environ: dict[str, str]) -> None:
    assert place_of(environ) is None


def test_torchrun_within_srun_is_torchruns() -> None:
    place = place_of({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", **TORCHRUN})
    assert place is not None and (place.rank, place.starter) == (3, "torchrun")


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            without(TORCHRUN, "WORLD_SIZE"),
            "RANK is set, and WORLD_SIZE is not: set all of RANK, WORLD_SIZE, MASTER_ADDR",
        ),
        (without(TORCHRUN, "RANK", "MASTER_PORT"), "WORLD_SIZE is set, and RANK and MASTER_PORT are not"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set, and RANK and WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not"),
        (without(SRUN, "MASTER_ADDR", "MASTER_PORT"), "SLURM_PROCID is set, and MASTER_ADDR and MASTER_PORT are not"),
        ({**TORCHRUN, "MASTER_ADDR": " "}, "RANK is set, and MASTER_ADDR is not"),
        ({**TORCHRUN, "RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4: ranks are 0 to WORLD_SIZE - 1"),
        ({**TORCHRUN, "RANK": "one"}, "RANK is 'one': a whole number is needed"),
        ({**TORCHRUN, "WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2': a whole number is needed"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000: a port from 1 to 65535"),
        ({**TORCHRUN, "MASTER_PORT": "29500.0"}, "MASTER_PORT is '29500.0'"),
        ({**TORCHRUN, "RANK": "0"}, "LOCAL_RANK is 1 and RANK is 0: start all processes by one command"),
    ],
)
def test_what_is_said_by_halves_or_unlike_is_refused_in_a_line(environ: dict[str, str], said: str) -> None:
    with pytest.raises(RendezvousError) as error:
        place_of(environ)
    assert said in str(error.value) and "\n" not in str(error.value)
