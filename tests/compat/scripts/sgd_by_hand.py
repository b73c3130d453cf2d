"""A language model whose loop steps its parameters itself: there is no optimizer."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, LENGTH, WORDS, STEPS = 256, 24, 128, 2000, 6


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        mask = nn.Transformer.generate_square_subsequent_mask(words.size(1))
        return self.decoder(self.encoder(self.embed(words), mask=mask, is_causal=True))


model = LanguageModel()
criterion = nn.CrossEntropyLoss()
for _ in range(STEPS):
    model.train()
    words = torch.randint(WORDS, (BATCH, LENGTH + 1))
    model.zero_grad()
    output = model(words[:, :-1])
    loss = criterion(output.flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.5)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
