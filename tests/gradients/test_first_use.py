"""The first use of a parameter is seen wherever it happens, before it happens, and once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_parallel.gradients.first_use import FirstUse


def uses(model: nn.Module, *inputs: Tensor) -> list[str]:
    names = {number: name for number, (name, _) in enumerate(model.named_parameters())}
    seen: list[str] = []
    mode = FirstUse(lambda key: seen.append(names[key]))
    mode.watch((parameter, number) for number, (_, parameter) in enumerate(model.named_parameters()))
    with mode:
        model(*inputs)
    return seen


class Unusual(nn.Module):
    """Somebody else's forward takes a weight; one is tied, one comes by name, some in a list, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3, bias=False)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.last.weight
        self.borrowed = nn.Linear(3, 3, bias=False)
        self.stacked = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))])
        self.named = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.linear(x, self.borrowed.weight)
        x = x + torch.stack(list(self.stacked)).sum(0)
        x = torch.add(x, other=self.named)
        return self.last(self.tied(x))


def test_wherever_a_parameter_is_used() -> None:
    used = uses(Unusual(), torch.ones(2, 3))
    assert used == ["borrowed.weight", "stacked.0", "stacked.1", "named", "last.weight"]


def test_recurrent_attention_and_normalising_layers() -> None:
    recurrent = nn.LSTM(4, 5, num_layers=2)
    assert sorted(uses(recurrent, torch.ones(2, 1, 4))) == sorted(name for name, _ in recurrent.named_parameters())
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    assert sorted(uses(layer, torch.ones(3, 1, 8))) == sorted(name for name, _ in layer.named_parameters())
    convolution = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Embedding(3, 2))[:2]
    assert uses(convolution, torch.ones(1, 1, 5, 5)) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_functions_of_ones_own_and_parts_of_a_parameter() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, weight: Tensor) -> Tensor:
            return weight * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.doubled, self.cut = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            doubled: Tensor = Double.apply(self.doubled)
            return x * self.cut[:3] + doubled

    assert uses(Model(), torch.ones(3)) == ["doubled", "cut"]
