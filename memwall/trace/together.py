"""Several models that one loop trains together, as one: a GAN's two, actor and critic, an encoder and its decoder."""

from collections.abc import Sequence

from torch import nn

from memwall.trace.modules import root_names


class TrainedTogether(nn.Module):
    """Holds models, each under the name of its class. Nobody calls it: the loop calls what it holds."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        for name, model in zip(root_names(models), models, strict=True):
            self.add_module(name, model)


def models_of(trained: nn.Module) -> tuple[nn.Module, ...]:
    """Returns what the loop calls: the model, or each of those that are trained together."""
    return tuple(trained.children()) if isinstance(trained, TrainedTogether) else (trained,)
