"""A language model writes answers token by token, is rewarded for them, and trains on them: generation in the loop."""

import hashlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
BATCH, LENGTH, NEW, WORDS, STEPS = 16, 96, 16, 500, 4
model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=128, n_embd=256, n_layer=6, n_head=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(STEPS):
    model.eval()
    with torch.no_grad():
        words = torch.randint(WORDS, (BATCH, LENGTH))
        for _ in range(NEW):
            scores = model(words).logits[:, -1]
            words = torch.cat([words, torch.multinomial(scores.softmax(-1), 1)], 1)
        rewards = (words[:, LENGTH:] % 2 == 0).float().mean(1)
    model.train()
    logs = model(words[:, :-1]).logits.log_softmax(-1).gather(-1, words[:, 1:, None]).squeeze(-1)
    loss = -(logs[:, LENGTH - 1 :].sum(1) * (rewards - rewards.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
