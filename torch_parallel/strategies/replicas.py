"""Replicas: making all ranks hold the same model, and finding out whether they still do."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from torch_parallel.communicator import Communicator

PIECE_ELEMENTS = 1 << 20
"""So many are broadcast at a time: the memory for it is kept, and need not be as large as the model."""


class ReplicasDiffer(RuntimeError):
    """Ranks that must hold the same bits do not."""


def give_everyone_the_same(model: nn.Module, communicator: Communicator) -> None:
    """Compares names, shapes and dtypes over the ranks, then gives all ranks rank 0's parameters and buffers.

    Raises TransportError naming the first tensor that differs.
    """
    tensors = list(model.named_parameters()) + list(model.named_buffers())
    for name, tensor in tensors:
        trainable = " (trainable)" if tensor.requires_grad else ""
        communicator.transport.agree(f"set up {name[:120]} {list(tensor.shape)} {tensor.dtype}{trainable}")
    communicator.transport.agree(f"set up a model of {len(tensors)} tensors")
    broadcast_all([tensor for _, tensor in tensors], communicator, root=0)


def broadcast_all(tensors: list[Tensor], communicator: Communicator, root: int) -> None:
    """Replaces every tensor by rank `root`'s, those of one dtype together."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        for piece in flat.split(PIECE_ELEMENTS):
            communicator.broadcast(piece, root)
        for tensor, values in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def check_replicas(model: nn.Module, communicator: Communicator) -> None:
    """Compares a hash of every parameter over all ranks, servers included.

    Raises ReplicasDiffer on all ranks, naming the first parameter that differs and the ranks that hold each value.
    Buffers are not compared: BatchNorm's are each worker's own.
    """
    names = [name for name, _ in model.named_parameters()]
    table = communicator.all_ranks(torch.tensor([_hash(parameter) for parameter in model.parameters()]))
    for name, hashes in zip(names, table.t().tolist(), strict=True):
        if len(set(hashes)) > 1:
            groups = [[rank for rank, other in enumerate(hashes) if other == value] for value in dict.fromkeys(hashes)]
            raise ReplicasDiffer(
                f"parameter {name} is not the same on all ranks: "
                + ", ".join(f"rank{'s' * (len(group) > 1)} {str(group)[1:-1]}" for group in groups)
                + " hold different values"
            )


def _hash(tensor: Tensor) -> int:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(data.data, digest_size=8).digest(), "little", signed=True)
