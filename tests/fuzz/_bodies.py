"""What a layer computes, by its kind: each has parameters that were once handled wrong somewhere.

`other` asks for the second set of parameters, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

DTYPE = torch.float64


def _random(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=DTYPE) / 2)


class Linear(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=hidden % 2 == 1, dtype=DTYPE)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return x if other else self.linear(x)


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, dtype=DTYPE)
        self.down = nn.Linear(hidden, width, dtype=DTYPE)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Norm(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=DTYPE)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return self.norm(x)


class Scalars(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.scale, self.shift, self.spare = _random(), _random(), _random()

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return x * self.scale + (self.spare if other else self.shift)


class Row(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.row, self.one = _random(1, width), _random(1)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return x * self.one if other else x * self.row + self.one


class Few(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.two, self.three, self.back = _random(2, width), _random(3, 2), _random(3, width)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return torch.tanh((x @ self.two.t()) @ self.three.t()) @ self.back


class Transposed(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_random(hidden, width).detach().t())
        self.back = _random(width, hidden)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.back.t()


class Branch(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.left = nn.Linear(width, width, dtype=DTYPE)
        self.right = nn.Linear(width, width, bias=False, dtype=DTYPE)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return self.right(x) if other else self.left(x)


class Single(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, dtype=torch.float32)
        self.down = nn.Linear(hidden, width, dtype=DTYPE)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        hidden = torch.tanh(self.up(x.to(self.up.weight.dtype)))
        return self.down(hidden.to(self.down.weight.dtype))


class Buffer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = _random(width)
        self.register_buffer("offset", torch.randn(width, dtype=DTYPE))

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return x * self.weight + self.offset.to(self.weight.dtype)


class Empty(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return torch.sin(x)


BODIES: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": Linear, "mlp": MLP, "norm": Norm, "scalars": Scalars, "row": Row, "few": Few,
    "transposed": Transposed, "branch": Branch, "single": Single, "buffer": Buffer, "empty": Empty,
}  # fmt: skip
