"""A convolutional network of one long sequence of layers, as tutorials have it."""

from torch import Tensor, nn


def features(*, is_in_place: bool = False, width: int = 8) -> nn.Sequential:
    """Convolutions with norms and ReLUs, and a pooling in between."""
    layers: list[nn.Module] = []
    for number in range(6):
        layers += [nn.Conv2d(width if number else 3, width, 3, padding=1), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(inplace=is_in_place)]
        layers += [nn.MaxPool2d(2)] if number == 3 else []
    return nn.Sequential(*layers)


class Network(nn.Module):
    """Such features, and a head."""

    def __init__(self, layers: nn.Sequential | None = None, width: int = 8) -> None:
        super().__init__()
        self.features = features(width=width) if layers is None else layers
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).mean((2, 3)))
        return out
