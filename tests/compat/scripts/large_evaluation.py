"""A residual classifier whose test batches are several times its training batches."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
BATCH, TEST_BATCH, STEPS, EPOCHS, WIDTH = 96, 384, 2, 2, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(WIDTH, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.conv2, self.norm2 = nn.Conv2d(WIDTH, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, WIDTH, 3, 1, 1), nn.Sequential(*(Block() for _ in range(6)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        return F.log_softmax(self.head(self.blocks(self.stem(x)).mean((2, 3))), dim=1)


train_set = TensorDataset(torch.rand(BATCH * STEPS, 3, 32, 32), torch.randint(10, (BATCH * STEPS,)))
test_set = TensorDataset(torch.rand(TEST_BATCH, 3, 32, 32), torch.randint(10, (TEST_BATCH,)))
train_loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
test_loader = DataLoader(test_set, batch_size=TEST_BATCH)
model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
for _ in range(EPOCHS):
    model.train()
    for data, labels in train_loader:
        optimizer.zero_grad()
        F.nll_loss(model(data), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for data, labels in test_loader:
            F.nll_loss(model(data), labels)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
