"""Scripts whose blocks consist of unusual layers: parametrizations, norms, other activations, shapes that change."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from scenarios.corpus import BATCH, NUM_CLASSES, WIDTH, Mlp, Net, Script, batch_of, scenario, supervised


class _Between(Mlp):
    """Is a block with one layer or function in its middle."""

    def __init__(self, made: Callable[[], Any]) -> None:
        super().__init__()
        self.middle = made()

    def between(self, y: Tensor) -> Tensor:
        out: Tensor = self.middle(y)
        return out


def _with(made: Callable[[], Any]) -> Script:
    return supervised(Net(_Between(made), _Between(made)))


MIDDLES: dict[str, Callable[[], Any]] = {
    "layer_norm": lambda: nn.LayerNorm(2 * WIDTH),
    "layer_norm_without_weights": lambda: nn.LayerNorm(2 * WIDTH, elementwise_affine=False),
    "group_norm": lambda: nn.GroupNorm(4, 2 * WIDTH),
    "rms_norm": lambda: nn.RMSNorm(2 * WIDTH),
    "batch_norm_without_running_statistics": lambda: nn.BatchNorm1d(2 * WIDTH, track_running_stats=False),
    "batch_norm_with_a_cumulative_average": lambda: nn.BatchNorm1d(2 * WIDTH, momentum=None),
    "lazy_linear": lambda: nn.LazyLinear(2 * WIDTH),
    "bilinear": lambda: _of_two(nn.Bilinear(2 * WIDTH, 2 * WIDTH, 2 * WIDTH)),
    "prelu": lambda: nn.PReLU(2 * WIDTH),
    "random_leaky_relu": lambda: nn.RReLU(),
    "relu_in_place": lambda: nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.ReLU(inplace=True)),
    "alpha_dropout": lambda: nn.AlphaDropout(0.2),
    "dropout_of_features": lambda: nn.Dropout1d(0.2),
    "dropout_in_place": lambda: nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Dropout(0.2, inplace=True)),
    "gumbel_softmax": lambda: functools.partial(F.gumbel_softmax, hard=True),
    "normal_noise": lambda: lambda y: y + 0.1 * torch.randn_like(y),
    "poisson_draws": lambda: lambda y: y + torch.poisson(y.detach().abs()),
    "a_permutation": lambda: lambda y: y[:, torch.randperm(y.shape[1])],
    "multinomial_draws": lambda: lambda y: y * torch.multinomial(y.detach().exp(), 1),
    "sorting": lambda: lambda y: y.sort(1).values,
    "the_largest_few": lambda: lambda y: torch.zeros_like(y).scatter(1, y.topk(5).indices, y.topk(5).values),
    "cumulative_sums": lambda: lambda y: y.cumsum(1) / y.shape[1],
    "einsum": lambda: lambda y: torch.einsum("bi,bj->bi", y, y) / y.shape[1],
    "fast_fourier_transform": lambda: lambda y: torch.fft.irfft(torch.fft.rfft(y), n=y.shape[1]),
    "an_eigenvalue": lambda: lambda y: y * torch.linalg.svdvals(y)[0],
    "a_where_on_values": lambda: lambda y: torch.where(y > 0, y.exp(), y.sin()),
    "a_loop_that_depends_on_values": lambda: _doubled_until_large,
    "a_branch_on_values": lambda: lambda y: y.sin() if y.sum() > 0 else y.cos(),
    "unique_values": lambda: lambda y: y * len(torch.unique((y * 3).round())),
    "boolean_indexing": lambda: lambda y: y + y[y > 0].mean(),
    "expanded_tensors": lambda: lambda y: y + y[:1].expand_as(y),
    "overlapping_windows": lambda: lambda y: F.pad(y.unfold(1, 4, 1).mean(-1), (0, 3)),
    "strided_views": lambda: lambda y: (y[:, ::2].repeat_interleave(2, 1) + y.t().contiguous().t()) / 2,
    "numbers_of_python": lambda: lambda y: y * float(y.detach().std()),
    "a_detour_by_numpy": lambda: lambda y: y * torch.from_numpy(y.detach().numpy().copy()).abs().mean(),
    "a_detour_by_float64": lambda: lambda y: y.double().exp().log1p().float(),
    "stopped_gradients": lambda: lambda y: y + (y.round() - y).detach(),
    "a_hook_on_a_tensor": lambda: _with_hook,
    "retained_gradients": lambda: _retained,
    "an_empty_tensor": lambda: lambda y: torch.cat([y, y[:0]]),
    "a_scalar_out_of_it": lambda: lambda y: y * y.square().mean().sqrt(),
    "chunks": lambda: lambda y: torch.cat([part.tanh() for part in y.chunk(4, 1)], 1),
    "no_gradients_by_a_decorator": lambda: lambda y: y + _constant(y),
    "attention_by_its_function": lambda: _attended,
    "functional_batch_norm": lambda: lambda y: F.batch_norm(y, None, None, training=True),
}


def _of_two(layer: nn.Module) -> Any:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, y: Tensor) -> Tensor:
            out: Tensor = self.layer(y, y.tanh())
            return out

    return Both()


def _doubled_until_large(y: Tensor) -> Tensor:
    while y.abs().max() < 4:
        y = y * 2
    return y


def _with_hook(y: Tensor) -> Tensor:
    z = y.sin()
    if z.requires_grad:
        z.register_hook(lambda gradient: gradient * 0.5)
    return z


def _retained(y: Tensor) -> Tensor:
    z = y.sin()
    if z.requires_grad:
        z.retain_grad()
    return z * 2


@torch.no_grad()
def _constant(y: Tensor) -> Tensor:
    return y.sigmoid()


def _attended(y: Tensor) -> Tensor:
    heads = y.view(1, 4, -1, 16)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).reshape_as(y)


def _registered(name: str, made: Callable[[], Any]) -> None:
    def build() -> Script:
        script = _with(made)
        if name == "lazy_linear":
            script.model(batch_of(0)[0])  # which makes its weights, as a script has to before it makes its optimizer
            return supervised(script.model)
        return script

    build.__name__, build.__doc__ = name, f"A block with {name.replace('_', ' ')}."
    scenario()(build)


for _name, _made in MIDDLES.items():
    _registered(_name, _made)


def _parametrized(change: Callable[[nn.Linear], Any]) -> Script:
    model = Net(Mlp(), Mlp())
    for block in model.blocks:
        change(block.up)
    return supervised(model)


@scenario()
def orthogonal_weights() -> Script:
    return _parametrized(parametrizations.orthogonal)


@scenario()
def weight_norm_by_parametrization() -> Script:
    return _parametrized(parametrizations.weight_norm)


@scenario()
def spectral_norm_by_parametrization() -> Script:
    return _parametrized(parametrizations.spectral_norm)


@scenario()
def a_parametrization_of_ones_own() -> Script:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(1, keepdim=True)

    return _parametrized(lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()))


@scenario()
def parametrizations_cached_over_a_forward() -> Script:
    script = _parametrized(parametrizations.orthogonal)

    def step(number: int) -> Tensor | float:
        with parametrize.cached():
            return script.step(number)

    return Script(script.model, script.optimizers, step)


def _of_sizes(*sizes: int) -> Script:
    return supervised(Net(Mlp(), Mlp()), batch=lambda number: batch_of(number, sizes[number % len(sizes)], WIDTH))


@scenario(num_steps=5)
def batches_that_grow_to_four_times() -> Script:
    return _of_sizes(BATCH, BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH)


@scenario(num_steps=5)
def batches_that_shrink() -> Script:
    return _of_sizes(4 * BATCH, 2 * BATCH, BATCH, 1, 1)


@scenario(num_steps=6)
def a_last_batch_that_is_short() -> Script:
    return _of_sizes(BATCH, BATCH, 3)


@scenario(num_steps=5)
def sequences_of_lengths_to_four_times() -> Script:
    class Sequence(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            out: Tensor = self.head(x.mean(1))
            return out

    return supervised(Sequence(Mlp(), Mlp()), batch=lambda number: batch_of(number, 4, 5 * (1 + number % 4), WIDTH))


@scenario()
def padded_sequences_with_lengths() -> Script:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.tensor([6, 4, 3, 1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return x + nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0]

    class Sequence(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            out: Tensor = self.head(x.mean(1))
            return out

    return supervised(Sequence(Packed(), Packed()), batch=lambda number: batch_of(number, 4, 6, WIDTH))


@scenario()
def packed_sequences_between_layers() -> Script:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: nn.utils.rnn.PackedSequence) -> nn.utils.rnn.PackedSequence:
            out: nn.utils.rnn.PackedSequence = self.cells(x)[0]
            return out

    class Sequence(Net):
        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.tensor([3, 6, 1, 4])
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            for block in self.blocks:
                x = block(x)
            out: Tensor = self.head(nn.utils.rnn.pad_packed_sequence(x, batch_first=True)[0].mean(1))
            return out

    return supervised(Sequence(Cells(), Cells()), batch=lambda number: batch_of(number, 4, 6, WIDTH))


@scenario()
def labels_of_another_type() -> Script:
    def batch(number: int) -> tuple[Tensor, Tensor]:
        x, y = batch_of(number)
        return x, F.one_hot(y, NUM_CLASSES).float()

    return supervised(Net(Mlp(), Mlp()), batch=batch)
