"""A model as it was: what forward wrote in a step that is skipped, or in an evaluation, is taken back."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from torch_parallel.gradients.layout import written_once
from torch_parallel.strategies.replicas import extra_state, of_parameters, set_extra_state


class ForwardState:
    """The buffers and the extra state of a model at one moment, and after `keep` at a later one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.keep()

    def keep(self) -> None:
        """From now on `restore` means this moment."""
        follow = of_parameters(self._model)
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, buffer, written_once(buffer).detach().clone())
            for module in self._model.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if buffer.untyped_storage().data_ptr() not in follow
        ]
        self._extra = copy.deepcopy(extra_state(self._model))

    def restore(self) -> None:
        """Gives every buffer its value back, and its place, should forward have put another tensor there."""
        kept = {(id(module), name) for module, name, _, _ in self._kept}
        follow = of_parameters(self._model)
        for module in self._model.modules():
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if (id(module), name) not in kept and buffer.untyped_storage().data_ptr() not in follow:
                    setattr(module, name, None)  # made since
        with torch.no_grad():
            for module, name, buffer, value in self._kept:
                if getattr(module, name) is not buffer and not isinstance(module, torch.jit.ScriptModule):
                    module._buffers[name] = buffer
                written_once(buffer).copy_(value)
        set_extra_state(self._model, copy.deepcopy(self._extra))
