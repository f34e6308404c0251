"""Models for tests of updates."""

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Three layers, two of them with equal biases, and a buffer outside the delegate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 8)])
        nn.init.zeros_(self.layers[0].bias)
        nn.init.zeros_(self.layers[1].bias)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x) + self.shift


class Wide(nn.Module):
    """Four layers of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class ConvNorm(nn.Module):
    """Batch normalizations behind convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.plain = nn.Conv2d(8, 4, 1, bias=False)
        self.plain_norm = nn.BatchNorm2d(4, affine=False)
        self.fc = nn.Linear(4, 3, bias=False)
        self.fc_norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain_norm(self.plain(torch.relu(self.norm(self.conv(x)))))
        return self.fc_norm(self.fc(x.mean((2, 3))))


class Convolutions(nn.Module):
    """Depthwise, grouped, transposed and one-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 8, 3, groups=4)
        self.grouped = nn.Conv2d(8, 6, 3, groups=2)
        self.transposed = nn.ConvTranspose2d(6, 4, 3, stride=2)
        self.transposed_grouped = nn.ConvTranspose2d(4, 6, 3, groups=2)
        self.line = nn.Conv1d(6, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.grouped(torch.relu(self.depthwise(x))))
        return self.line(self.transposed_grouped(self.transposed(x)).flatten(2))


class PReLU(nn.Module):
    """A constant that XNNPACK does not pack but continues to read, and a normalization without a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.slope = nn.PReLU(6)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.slope(self.conv(x)))


class Small(nn.Module):
    """Convolutions and linear layers for int8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.first = nn.Linear(8, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.depthwise(torch.relu(self.conv(x))))
        return self.second(torch.relu(self.first(x.mean((2, 3)))))


class Linears(nn.Module):
    """Rows of even and odd length for 4 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32, bias=False)
        self.second = nn.Linear(32, 33)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))
