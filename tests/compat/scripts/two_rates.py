"""A vision transformer with two groups of parameters and a learning rate that warms up."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, SIZE, PATCH, STEPS = 256, 32, 64, 8, 5


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 65, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.encoder(x)[:, 0])


model = ViT()
head = list(model.head.parameters())
body = [p for name, p in model.named_parameters() if not name.startswith("head")]
optimizer = torch.optim.AdamW([{"params": body, "lr": 1e-4}, {"params": head, "lr": 1e-3, "weight_decay": 0.0}])
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
for _ in range(STEPS):
    images, labels = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(10, (BATCH,))
    loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
