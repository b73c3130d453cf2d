"""Blocks and models of many kinds."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenarios.corpus import BATCH, NUM_CLASSES, WIDTH, Mlp, Net, Script, batch_of, scenario, supervised

TOKENS = 6


def _tokens(number: int) -> tuple[Tensor, Tensor]:
    return batch_of(number, BATCH, TOKENS, WIDTH)


class Sequence(Net):
    """Blocks over [batch, tokens, width], and a head on the mean."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


@scenario()
def transformer_layers_with_dropout() -> Script:
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True) for _ in range(2)]
    return supervised(Sequence(*layers), batch=_tokens)


@scenario()
def attention_with_a_mask() -> Script:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
            out: Tensor = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
            return x + out

    return supervised(Sequence(Block(), Block()), batch=_tokens)


@scenario()
def recurrent_layers() -> Script:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.rnn(x)[0]
            return out

    return supervised(Sequence(Block(), Block()), batch=_tokens)


@scenario()
def convolutions_with_batch_norm() -> Script:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32)
            self.down = nn.Conv2d(32, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.relu(self.norm(self.up(x)), inplace=True))

    class Images(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.unflatten(1, (8, 2, 2))
            for block in self.blocks:
                x = block(x)
            out: Tensor = self.head(x.flatten(1))
            return out

    return supervised(Images(Block(), Block()))


@scenario(blocks=("blocks.0",))
def tied_blocks() -> Script:
    block = Mlp()
    return supervised(Net(block, block))


@scenario()
def tied_weights() -> Script:
    model = Net(Mlp(), Mlp())
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return supervised(model)


@scenario()
def a_block_that_is_called_twice() -> Script:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(block(x))
            out: Tensor = self.head(x)
            return out

    return supervised(Twice(Mlp(), Mlp()))


@scenario()
def an_unused_block() -> Script:
    class Partly(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.blocks[0](x))
            return out

    return supervised(Partly(Mlp(), Mlp()))


@scenario()
def mixture_of_experts() -> Script:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Mlp() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.gate(x).softmax(1).max(1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            return out

    return supervised(Net(Experts(), Experts()))


@scenario()
def leaves_early() -> Script:
    class Early(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                if float(x.detach().mean()) > 0:
                    break
            out: Tensor = self.head(x)
            return out

    return supervised(Early(Mlp(), Mlp()))


@scenario()
def weight_norm() -> Script:
    def block() -> Mlp:
        made = Mlp()
        nn.utils.parametrizations.weight_norm(made.up)
        return made

    return supervised(Net(block(), block()))


@scenario()
def spectral_norm() -> Script:
    def block() -> Mlp:
        made = Mlp()
        nn.utils.parametrizations.spectral_norm(made.up)
        return made

    return supervised(Net(block(), block()))


@scenario()
def pruned_weights() -> Script:
    from torch.nn.utils import prune

    model = Net(Mlp(), Mlp())
    prune.random_unstructured(model.blocks[0].up, "weight", 0.3)
    return supervised(model)


@scenario()
def blocks_of_bare_parameters() -> Script:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(
                [nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 8), nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 8)]
            )

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = torch.tanh(x @ weight)
            return x

    return supervised(Net(Block(), Block()))


@scenario()
def a_scripted_layer_in_a_block() -> Script:
    @torch.jit.script
    def scaled(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            out: Tensor = scaled(y)
            return out

    return supervised(Net(Block(), Block()))


@scenario()
def embeddings_and_a_loss_inside() -> Script:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.blocks = nn.Embedding(50, WIDTH), nn.ModuleList([Mlp(), Mlp()])
            self.head = nn.Linear(WIDTH, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            for block in self.blocks:
                h = block(h)
            out: Tensor = self.head(h).mean(1)
            return out

    def batch(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return torch.randint(50, (BATCH, TOKENS), generator=generator), torch.randint(4, (BATCH,), generator=generator)

    return supervised(Language(), batch=batch)


@scenario()
def bags_with_sparse_gradients() -> Script:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(100, WIDTH, sparse=True)
            self.blocks, self.head = nn.ModuleList([Mlp(), Mlp()]), nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = self.bag(x)
            for block in self.blocks:
                h = block(h)
            out: Tensor = self.head(h)
            return out

    def batch(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return torch.randint(100, (BATCH, 5), generator=generator), torch.randint(4, (BATCH,), generator=generator)

    model = Bags()
    return supervised(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=batch)


@scenario()
def weights_from_numpy() -> Script:
    import numpy as np

    model = Net(Mlp(), Mlp())
    values = np.random.default_rng(0).standard_normal((NUM_CLASSES, WIDTH)).astype("float32")
    model.head.weight = nn.Parameter(torch.from_numpy(values))
    return supervised(model)


@scenario()
def half_precision_weights() -> Script:
    model = Net(Mlp(), Mlp()).bfloat16()

    def batch(number: int) -> tuple[Tensor, Tensor]:
        x, y = batch_of(number)
        return x.bfloat16(), y

    return supervised(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=batch)
