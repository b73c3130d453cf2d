"""Full fine-tuning of a Llama: all weights in bfloat16, AdamW, one long sample a step.

With a folder of downloaded weights as --model these are tuned; with a config.json alone the weights are random.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", type=Path, default=Path(__file__).parent, help="folder of config.json, and of weights")
parser.add_argument("--seq", type=int, default=1024)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="llama.pt", help="where the trained weights go")
parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, for a few seconds")
args = parser.parse_args()
torch.manual_seed(0)

config = AutoConfig.from_pretrained(args.model)
length, batch, num_steps = args.seq, 1, args.steps
if args.tiny:
    length, batch, num_steps = 128, 20, 3
    config.update(
        {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 1000, "head_dim": 32}
    )
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2})
dtype, device = (torch.float32, "cpu") if args.tiny else (torch.bfloat16, "cuda")
if any(args.model.glob("*.safetensors")):
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
else:
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
model.config.use_cache = False
model.to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

for step in range(num_steps):
    begin = time.perf_counter()
    tokens = torch.randint(3, config.vocab_size, (batch, length)).to(device)  # your own text goes here
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)
torch.save(model.state_dict(), args.out)
