"""QLoRA on a Qwen3 with PEFT and bitsandbytes: a base of 4 bits (NF4), adapters at every linear layer.

With a folder of downloaded weights as --model these are the base; with a config.json alone the base is random.
"""

import argparse
import time
from pathlib import Path

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

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


def quantised(layer: nn.Linear) -> nn.Module:
    """Returns a layer with the same weight in 4 bits; it is quantised on its way to the device."""
    found = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
    )
    found.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
    return found.to(device)


if any(args.model.glob("*.safetensors")):
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, quantization_config=how)
else:
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for block in base.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, layer in list(part.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(part, name, quantised(layer))
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
