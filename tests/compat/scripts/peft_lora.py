"""A loop of one's own trains PEFT's LoRA adapters on a frozen base in bfloat16, and saves them."""

import hashlib

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

torch.manual_seed(0)
WORDS, BATCH, LENGTH, STEPS = 1000, 24, 192, 3
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
).to(torch.bfloat16)
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.05))
model.print_trainable_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 1, STEPS)
model.train()
for _ in range(STEPS):
    batch = torch.randint(WORDS, (BATCH, LENGTH))
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
model.save_pretrained("adapters")
digest = hashlib.sha256()
for p in model.parameters():
    if p.requires_grad:
        digest.update(p.detach().float().numpy())
print("weights", digest.hexdigest())
