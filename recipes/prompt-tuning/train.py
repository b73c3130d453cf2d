"""Prompt tuning with PEFT: 20 vectors before the text are all that is trained; the model behind them is frozen."""

import argparse
import time

import torch
from peft import PromptTuningConfig, TaskType, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="prompt.pt", help="where the trained vectors go")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
args = parser.parse_args()
num_layers, width, batch, length = (4, 128, 16, 108) if args.tiny else (8, 256, 6, 236)
num_steps = 3 if args.tiny else args.steps
torch.manual_seed(0)

base = GPT2LMHeadModel(GPT2Config(vocab_size=2000, n_positions=length + 20, n_embd=width, n_layer=num_layers, n_head=4))
model = get_peft_model(base, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=20))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.03)
model.train()
for step in range(num_steps):
    begin = time.perf_counter()
    tokens = torch.randint(2000, (batch, length))
    tokens[:, 1::2] = tokens[:, ::2]  # each word is said twice
    loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)
torch.save({name: p.detach() for name, p in model.named_parameters() if p.requires_grad}, args.out)
