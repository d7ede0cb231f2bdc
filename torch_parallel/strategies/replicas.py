"""Replicas: making all ranks hold the same model, and finding out whether they still do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_parallel.communicator import Communicator
from torch_parallel.gradients.layout import as_bytes, canonical_strides, written_once
from torch_parallel.strategies.model_check import UnsupportedModel
from torch_parallel.workloads.whole_model import digests, extra_state, of_parameters, set_extra_state, set_modes

PIECE_BYTES = 4 << 20
"""So many are broadcast at a time: the memory for it is kept, and need not be as large as the model."""


class ReplicasDiffer(RuntimeError):
    """Ranks that must hold the same bits do not."""


def give_everyone_the_same(model: nn.Module, communicator: Communicator) -> None:
    """Compares the models of all ranks, then gives all ranks rank 0's parameters and buffers, and its extra state.

    Raises TransportError naming the first tensor that differs in name, shape, dtype, layout or in being trainable, and
    where modes or the keys of `state_dict()` differ.
    """
    tensors = [*model.named_parameters(), *own_buffers(model).items()]
    for name, tensor in tensors:
        communicator.transport.agree(f"set up {name[:120]} {list(tensor.shape)} {_kind_of(tensor)}")
    evaluating = [name or "the model" for name, module in model.named_modules() if not module.training]
    entries = len(model.state_dict(keep_vars=True))
    modes = f"in eval mode: {', '.join(evaluating)}" if evaluating else "all in training mode"
    communicator.transport.agree(f"set up a model of {len(tensors)} tensors, {entries} entries, {modes}")
    broadcast_all([tensor for _, tensor in tensors], communicator, root=0)
    _share_extra_state(model, communicator, root=0)


def _kind_of(tensor: Tensor) -> str:
    trainable = " (trainable)" if tensor.requires_grad else ""
    layout = "" if tensor.is_contiguous() else f" strides {canonical_strides(tensor)}"
    return f"{tensor.dtype}{trainable}{layout}"


def broadcast_all(tensors: list[Tensor], communicator: Communicator, root: int) -> None:
    """Replaces every tensor, of whatever dtype, by rank `root`'s."""
    if tensors and communicator.world_size > 1:
        flat = _packed(tensors)
        _broadcast_pieces(flat, communicator, root)
        _unpack(flat, tensors)


def _packed(tensors: list[Tensor]) -> Tensor:
    """A copy of the bytes of all, one after another; of each the elements in the order of their indices."""
    return torch.cat([as_bytes(written_once(tensor.detach())) for tensor in _large_elements_first(tensors)])


def _unpack(flat: Tensor, tensors: list[Tensor]) -> None:
    targets = [written_once(tensor.detach()) for tensor in _large_elements_first(tensors)]
    parts = flat.split([target.numel() * target.itemsize for target in targets])
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.view(target.dtype).view(target.shape))


def _large_elements_first(tensors: list[Tensor]) -> list[Tensor]:
    """So each begins at a multiple of its elements' size, where they can be read as what they are."""
    return sorted(tensors, key=lambda each: -each.itemsize)


def _broadcast_pieces(flat: Tensor, communicator: Communicator, root: int) -> None:
    for piece in flat.split(PIECE_BYTES):
        communicator.broadcast(piece, root)


def own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """By name, all that do not lie over parameters."""
    follow = of_parameters(model)
    return {name: each for name, each in model.named_buffers() if each.untyped_storage().data_ptr() not in follow}


def share_state(model: nn.Module, communicator: Communicator, root: int, adopt: bool = True) -> None:
    """Gives all ranks that `adopt` it what forward may have changed on rank `root`: buffers, those made since set-up
    too, what modules return by `get_extra_state`, and modes. All ranks call it.

    Raises UnsupportedModel where forward has made a module there, which a rank that adopts it has not.
    """
    if communicator.world_size == 1:
        return
    buffers, modes = own_buffers(model), {name: module.training for name, module in model.named_modules()}
    own = {name: described(buffer) for name, buffer in buffers.items()}, modes, extra_state(model)
    wanted, modes, extra = communicator.broadcast_object(own, root)
    if wanted:
        device = next(each.device for each in (*model.parameters(), *buffers.values()))
        of_root = list(buffers.values()) if communicator.rank == root else _like(wanted, device)
        flat = _packed(of_root)
        _broadcast_pieces(flat, communicator, root)
    if adopt and communicator.rank != root:
        _check_modules(model, modes)
        set_modes([(model.get_submodule(name), training) for name, training in modes.items()])
        set_extra_state(model, extra)
        for name in buffers.keys() - wanted.keys():
            _owner(model, name)._buffers[_leaf(name)] = None
        if wanted:
            make_missing_buffers(model, wanted)
            present = dict(model.named_buffers())
            _unpack(flat, [present[name] for name in wanted])


def _check_modules(model: nn.Module, modes: dict[str, bool]) -> None:
    own = {name for name, _ in model.named_modules()}
    made = [name for name in modes if name not in own]
    if made:
        raise UnsupportedModel(
            f"module {made[0]} was made by forward, so a rank without a sample has it not: make it in make_model"
        )


Description = tuple[torch.dtype, list[int], list[int]]


def described(buffer: Tensor) -> Description:
    """Of what dtype and shape it is, and in which shape it is written (see `written_once`)."""
    return buffer.dtype, list(buffer.shape), list(written_once(buffer).shape)


def _like(wanted: dict[str, Description], device: torch.device) -> list[Tensor]:
    return [torch.empty(written, dtype=dtype, device=device) for dtype, _, written in wanted.values()]


def make_missing_buffers(model: nn.Module, wanted: dict[str, Description]) -> None:
    """Afterwards the model has buffers of these names, dtypes and shapes; those that it did not have hold anything."""
    device = next((each.device for each in (*model.parameters(), *model.buffers())), None)
    present = dict(model.named_buffers())
    for name, description in wanted.items():
        if name not in present or described(present[name]) != description:
            dtype, shape, written = description
            module, new = _owner(model, name), torch.empty(written, dtype=dtype, device=device).expand(shape)
            if _leaf(name) in module._buffers:
                module._buffers[_leaf(name)] = new
            else:
                module.register_buffer(_leaf(name), new)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _share_extra_state(model: nn.Module, communicator: Communicator, root: int) -> None:
    own = extra_state(model)
    if own and communicator.world_size > 1:
        theirs = communicator.broadcast_object(own, root)
        if communicator.rank != root:
            set_extra_state(model, theirs)


def check_replicas(model: nn.Module, communicator: Communicator) -> None:
    """Compares a hash of every parameter over all ranks, servers included.

    Raises ReplicasDiffer on all ranks, naming the first parameter that differs and the ranks that hold each value.
    Buffers are not compared: BatchNorm's are each worker's own.
    """
    own = digests(model)
    table = communicator.all_ranks(torch.tensor(list(own.values()), device="cpu"))
    for name, hashes in zip(own, table.t().tolist(), strict=True):
        if len(set(hashes)) > 1:
            groups = [[rank for rank, other in enumerate(hashes) if other == value] for value in dict.fromkeys(hashes)]
            raise ReplicasDiffer(
                f"parameter {name} is not the same on all ranks: "
                + ", ".join(f"rank{'s' * (len(group) > 1)} {str(group)[1:-1]}" for group in groups)
                + " hold different values"
            )
