"""Buffers as they were: what forward wrote in a step that is skipped, or in an evaluation, is taken back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_parallel.gradients.layout import written_once


class BufferValues:
    """The buffers of a model at one moment, and after `keep` at a later one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.keep()

    def keep(self) -> None:
        """From now on `restore` means this moment."""
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, buffer, written_once(buffer).detach().clone())
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Gives every buffer its value back, and its place, should forward have put another tensor there."""
        kept = {(id(module), name) for module, name, _, _ in self._kept}
        for module in self._model.modules():
            for name in module._buffers:
                if (id(module), name) not in kept:
                    module._buffers[name] = None  # made since
        with torch.no_grad():
            for module, name, buffer, value in self._kept:
                module._buffers[name] = buffer
                written_once(buffer).copy_(value)
