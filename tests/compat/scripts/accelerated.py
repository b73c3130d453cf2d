"""A loop of Accelerate's: prepared objects, accumulation, clipping, and saved state."""

import hashlib

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
WIDTH, BATCH, LENGTH = 256, 32, 64
layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
model = nn.Sequential(nn.Linear(16, WIDTH), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False))
data = TensorDataset(torch.randn(192, LENGTH, 16), torch.randn(192, WIDTH))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
for _ in range(2):
    for batch, wanted in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(batch).mean(1), wanted)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state("state")
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
