"""A policy is trained on pairs of answers against a frozen reference of itself, as in DPO."""

import copy
import hashlib

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
BATCH, LENGTH, WORDS, STEPS = 4, 96, 1000, 4
policy = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=256, n_layer=6, n_head=4))
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)


def log_probability(model, words):
    scores = model(words).logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, words[:, 1:, None]).squeeze(-1).sum(-1)


for _ in range(STEPS):
    words = torch.randint(WORDS, (2 * BATCH, LENGTH))
    with torch.no_grad():
        before = log_probability(reference, words)
    gain = log_probability(policy, words) - before
    loss = -F.logsigmoid(0.1 * (gain[:BATCH] - gain[BATCH:])).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = b"".join(p.detach().numpy().tobytes() for p in policy.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
