"""Makes blocks of a sequence's consecutive layers, which are no modules, and has the sequence call them as such."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from memwall.torch_internals.modules import own_modules
from memwall.trace.attached import forward_of, wrap_forward
from memwall.trace.modules import calls_layers_in_turn

_log = logging.getLogger(__name__)


class DividedSequences:
    """Holds the sequences that are called run by run, by the paths of the runs (memwall/planning/layer_runs.py).

    Args:
        modules: the model's, by path.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._runs: dict[str, dict[str, tuple[nn.Module, str]]] = {}
        """A run and the name of its last layer, by the path of its sequence and the name of its first layer."""

    def run(self, path: str) -> nn.Module | None:
        """Returns the run of layers that a path names, as a module of its own; None where there are no such layers."""
        parent, _, names = path.rpartition(".")
        parent = parent or next(iter(self._modules))  # the root, whatever it is called
        first, colon, last = names.partition(":")
        sequence = self._modules.get(parent)
        if not colon or sequence is None or not calls_layers_in_turn(sequence):
            return None
        layers = own_modules(sequence)
        in_turn = list(layers)
        if first not in in_turn or last not in in_turn[in_turn.index(first) + 1 :]:
            return None
        run = nn.Sequential()
        for name in in_turn[in_turn.index(first) : in_turn.index(last) + 1]:
            run.add_module(name, layers[name])
        self._runs.setdefault(parent, {})[first] = run, last
        return run

    def holds(self, module: nn.Module) -> bool:
        """Returns whether a module is one of the sequences."""
        return any(self._modules[path] is module for path in self._runs)

    def wrap(self) -> list[Callable[[], None]]:
        """Has the sequences call their runs; returns what gives each its forward back.

        Raises:
            ApplyError: one takes no forward.
        """
        return [_wrapped(self._modules[path], path, runs) for path, runs in self._runs.items()]


def _wrapped(sequence: nn.Module, path: str, runs: Mapping[str, tuple[nn.Module, str]]) -> Callable[[], None]:
    told: list[str] = []

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layers = own_modules(sequence)
        held = (pair for run, _ in runs.values() for pair in own_modules(run).items())
        is_same = all(layers.get(name) is layer for name, layer in held)
        if not is_same and not told:
            told.append(path)
            _log.warning("'%s' keeps what it saves: a layer of it was replaced after the plan was made", path)
        if kwargs or len(args) != 1 or not is_same:
            return original(*args, **kwargs)  # which says itself what is wrong with arguments
        (x,) = args
        last = ""
        for name, layer in layers.items():
            if last:
                last = "" if name == last else last
            elif name in runs:
                run, last = runs[name]
                x = forward_of(run)(x)
            elif layer is not None:
                x = layer(x)
        return x

    return wrap_forward(sequence, forward, path, is_innermost=True)
