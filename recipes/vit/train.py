"""A vision transformer of transformers, with label smoothing and two rates: the head learns faster than the rest."""

import argparse
import time

import torch
import torch.nn.functional as F
from transformers import ViTConfig, ViTForImageClassification

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="vit.pt", help="where the trained weights go")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
args = parser.parse_args()
num_layers, width, batch, size = (4, 128, 32, 96) if args.tiny else (8, 192, 20, 224)
num_steps = 3 if args.tiny else args.steps
torch.manual_seed(0)
colours = torch.rand(10, 3, 1, 1)

model = ViTForImageClassification(
    ViTConfig(
        image_size=size, patch_size=size // 12, hidden_size=width, num_hidden_layers=num_layers,
        num_attention_heads=4, intermediate_size=4 * width, num_labels=10, hidden_dropout_prob=0.1,
    )
)  # fmt: skip
optimizer = torch.optim.AdamW(
    [{"params": model.vit.parameters(), "lr": 3e-4}, {"params": model.classifier.parameters(), "lr": 3e-3}]
)
model.train()
for step in range(num_steps):
    begin = time.perf_counter()
    labels = torch.randint(10, (batch,))
    images = colours[labels] + 0.3 * torch.randn(batch, 3, size, size)
    loss = F.cross_entropy(model(pixel_values=images).logits, labels, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)
torch.save(model.state_dict(), args.out)
