"""Direct preference optimization: a policy is trained on pairs of answers against a frozen copy of itself."""

import argparse
import copy
import time

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="dpo.pt", help="where the trained policy goes")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
args = parser.parse_args()
num_layers, width, pairs, length = (4, 128, 8, 96) if args.tiny else (8, 256, 6, 160)
num_steps, beta = 3 if args.tiny else args.steps, 0.1
torch.manual_seed(0)

policy = GPT2LMHeadModel(GPT2Config(vocab_size=2000, n_positions=length, n_embd=width, n_layer=num_layers, n_head=4))
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)


def pairs_of_answers():
    """Prompts with two answers each; the one that people chose says the prompt's first word again."""
    tokens = torch.randint(2000, (pairs, length))
    chosen, rejected = tokens.clone(), tokens.clone()
    chosen[:, length // 2 :: 4] = tokens[:, :1]
    rejected[:, length // 2 :] = torch.randint(2000, (pairs, length - length // 2))
    return torch.cat([chosen, rejected])


def log_probabilities(model, tokens):
    """The log-probability of each answer, the second half of its row."""
    logits = model(tokens).logits[:, :-1].log_softmax(-1)
    each = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return each[:, length // 2 - 1 :].sum(-1)


policy.train()
for step in range(num_steps):
    begin = time.perf_counter()
    tokens = pairs_of_answers()
    with torch.no_grad():
        before = log_probabilities(reference, tokens)
    gained = beta * (log_probabilities(policy, tokens) - before)
    loss = -F.logsigmoid(gained[:pairs] - gained[pairs:]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)
torch.save(policy.state_dict(), args.out)
