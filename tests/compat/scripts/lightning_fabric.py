"""A loop under Lightning's Fabric, in its bf16-mixed precision, which wraps the model and the optimizer."""

import hashlib

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORDS, WIDTH, LENGTH = 1000, 192, 128
fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(0)
layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
model = nn.Sequential(
    nn.Embedding(WORDS, WIDTH), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(WIDTH, 20)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
words = torch.randint(WORDS, (288, LENGTH))
loader = DataLoader(TensorDataset(words, words % 20), batch_size=96)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for batch, tags in loader:
    loss = F.cross_entropy(model(batch).flatten(0, 1).float(), tags.flatten())
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
digest = hashlib.sha256()
for p in model.parameters():
    digest.update(p.detach().numpy())
print("weights", digest.hexdigest())
