"""A user's script: trains a small GPT-2 with dropout in a loop of Accelerate's, accumulating, saves the weights."""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_inner=384, n_layer=4, n_head=4, vocab_size=128, n_positions=256, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(torch.randint(0, 128, (64, 256)), batch_size=16, shuffle=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    torch.save(accelerator.unwrap_model(model).state_dict(), out)


if __name__ == "__main__":
    main()
