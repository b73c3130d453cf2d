"""A plain training loop: a byte-level GPT on the text of Python's standard library. Knows nothing of memwall."""

import argparse
import resource
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, sequence, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    def __init__(self, width: int, num_layers: int, num_heads: int, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(sequence, width))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, bytes_in: Tensor) -> Tensor:
        x = self.tokens(bytes_in) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text(num_bytes: int) -> Tensor:
    """The first bytes of the standard library's sources, in the order of their names."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    return torch.frombuffer(bytearray(text[:num_bytes]), dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--muon", action="store_true", help="for the matrices of blocks, beside AdamW for the rest")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    torch.manual_seed(0)
    text = read_text(1 << 20)
    model = GPT(args.width, args.layers, args.heads, args.sequence)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2] if args.muon else []
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=1e-3)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=1e-3))
    for step in range(args.steps):
        starts = torch.randint(len(text) - args.sequence - 1, (args.batch,)).tolist()
        rows = torch.stack([text[start : start + args.sequence + 1] for start in starts]).long()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    if args.out is not None:
        save_file(model.state_dict(), args.out)
    print(f"peak_bytes {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}", flush=True)


if __name__ == "__main__":
    main()
