"""A small T5 of transformers in a plain loop, with labels that are padded."""

import hashlib

import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
BATCH, LENGTH, WORDS, STEPS = 16, 96, 1000, 4
config = T5Config(
    vocab_size=WORDS, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4, decoder_start_token_id=0
)
model = T5ForConditionalGeneration(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(STEPS):
    words, labels = torch.randint(1, WORDS, (2, BATCH, LENGTH))
    labels[:, 64:] = -100
    loss = model(input_ids=words, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
