"""A graph convolutional network of PyTorch Geometric's on a made-up graph: all nodes in each step."""

import hashlib

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCN

torch.manual_seed(0)
num_nodes, num_edges, num_classes = 12_000, 100_000, 8
labels = torch.randint(num_classes, (num_nodes,))
graph = Data(
    x=torch.randn(num_nodes, 64) + torch.nn.functional.one_hot(labels, 64),
    edge_index=torch.randint(num_nodes, (2, num_edges)),
    y=labels,
)
model = GCN(in_channels=64, hidden_channels=128, num_layers=6, out_channels=num_classes, dropout=0.2, norm="layer_norm")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
for epoch in range(4):
    model.train()
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(graph.x, graph.edge_index), graph.y)
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.6f}")
digest = hashlib.sha256()
for p in model.parameters():
    digest.update(p.detach().numpy())
print("weights", digest.hexdigest())
