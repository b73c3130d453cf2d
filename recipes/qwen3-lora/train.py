"""LoRA on a Qwen3 in bfloat16 with PEFT: adapters at every linear layer.

With a folder of downloaded weights as --model these are the base; with a config.json alone the base is random.
"""

import argparse
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", type=Path, default=Path(__file__).parent, help="folder of config.json, and of weights")
parser.add_argument("--seq", type=int, default=2048)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--out", default="adapters.pt", help="where the trained adapters go")
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
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 4})
device = "cpu" if args.tiny else "cuda"
if any(args.model.glob("*.safetensors")):
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
else:
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
base.config.use_cache = False
model = get_peft_model(base.to(device), LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)

for step in range(num_steps):
    begin = time.perf_counter()
    tokens = torch.randint(3, config.vocab_size, (batch, length)).to(device)  # your own text goes here
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)
torch.save({name: p.detach() for name, p in model.named_parameters() if p.requires_grad}, args.out)
