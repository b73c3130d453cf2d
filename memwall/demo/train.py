"""Trains in plain PyTorch: a byte-level GPT of 25 million parameters on the sources of Python's own library.

Nothing in it knows about memwall. `memwall demo` runs it once as it is, and once with `memwall run`.
"""

import argparse
import hashlib
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TransformerBlock(nn.Module):
    """Computes a pre-norm transformer layer; [batch, tokens, width] in and out."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        wide: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + wide


class GPT(nn.Module):
    """Predicts the next byte; [batch, tokens] bytes in, [batch, tokens, 256] logits out."""

    def __init__(self, width: int, num_layers: int, num_tokens: int) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(num_tokens, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, width // 64) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.byte(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def library_text(num_bytes: int) -> Tensor:
    """Returns the first bytes of Python's standard library and its documentation, in a fixed order."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    return torch.frombuffer(bytearray(text[:num_bytes]), dtype=torch.uint8)


def device_peak_bytes() -> int:
    """Returns what this process made the CUDA device hold at most: torch's segments, and what lies beside them."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--log", type=Path, help="write losses, step times and a digest of the weights here")
    options = parser.parse_args()
    # Two runs shall end with the same bits: https://github.com/pytorch/pytorch/issues/188792
    torch.ones(1).sqrt()
    torch.manual_seed(0)
    text = library_text(2_000_000)
    model = GPT(options.width, options.layers, options.tokens).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses, seconds = [], []
    for step in range(options.steps):
        starts = torch.randint(0, len(text) - options.tokens - 1, (options.batch,))
        window = torch.stack([text[start : start + options.tokens + 1] for start in starts]).long().to(options.device)
        begin = time.perf_counter()
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # and a device is done
        seconds.append(time.perf_counter() - begin)
        del logits, loss
        print(f"step {step}: loss {losses[-1]:.4f}, {seconds[-1]:.2f} s", flush=True)
    if options.log:
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
        record: dict[str, Any] = {"losses": losses, "step_seconds": seconds, "weights_sha256": digest.hexdigest()}
        if options.device != "cpu":
            record["device_peak_bytes"] = device_peak_bytes()
        options.log.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
