"""A convolutional classifier whose test batches are many times its training batches."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
BATCH, TEST_BATCH, STEPS, EPOCHS = 64, 1000, 4, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


train_set = TensorDataset(torch.rand(BATCH * STEPS, 1, 28, 28), torch.randint(10, (BATCH * STEPS,)))
test_set = TensorDataset(torch.rand(TEST_BATCH, 1, 28, 28), torch.randint(10, (TEST_BATCH,)))
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
