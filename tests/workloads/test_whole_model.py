"""What controls need to know of a model beside its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_parallel.workloads.whole_model import in_type, left_as_it_is, state_on_cpu


class Counting(nn.Module):
    """Writes into buffers, puts another one in a place, and counts in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("one_for_all", torch.zeros(1).expand(3))
        self.register_buffer("last", torch.zeros(1))
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        self.last = x.sum().reshape(1)
        return x


def test_what_forward_writes_is_taken_back() -> None:
    model: Any = Counting()
    last = model.last
    with left_as_it_is(model):
        model(torch.ones(3))
        assert model.calls == 1 and model.seen.tolist() == [1, 1]
    assert model.calls == 0 and model.seen.tolist() == [0, 0] and model.last is last


def test_types_that_a_part_has_on_purpose_stay() -> None:
    model = nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.float16)})
    model.register_buffer("c", torch.ones(1, dtype=torch.complex64))
    model.register_buffer("n", torch.ones(1, dtype=torch.int32))
    types = {name: each.dtype for name, each in in_type(model, torch.float64).state_dict().items()}
    assert types == {"a": torch.float64, "b": torch.float16, "c": torch.complex128, "n": torch.int32}
    same = nn.ParameterDict({"b": torch.ones(1, dtype=torch.float64)})
    assert in_type(same, torch.float32)["b"].dtype == torch.float64


def test_extra_state_that_is_no_tensor_is_saved_as_it_is() -> None:
    assert state_on_cpu(Counting())["_extra_state"] == {"calls": 0}
