"""Mixed precision by hand: float32 weights that an optimizer trains; bfloat16 copies for the model each step."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, LAYERS, VOCABULARY, BATCH, LENGTH, STEPS = 192, 20, 1000, 56, 128, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model()
masters = [parameter.detach().clone() for parameter in model.parameters()]
model.bfloat16()
optimizer = torch.optim.AdamW(masters, lr=1e-3)
for _ in range(STEPS):
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.data = master.bfloat16()
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    logits = model(ids[:, :-1]).float()
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        master.grad, parameter.grad = parameter.grad.float(), None
    optimizer.step()
    optimizer.zero_grad()
print("weights", hashlib.sha256(b"".join(master.numpy().tobytes() for master in masters)).hexdigest())
