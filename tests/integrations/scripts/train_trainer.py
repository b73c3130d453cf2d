"""A user's script: trains a small Llama with the Trainer, evaluates after each step, saves the weights."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, vocab_size=128)
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (48, 256))]
    args = TrainingArguments(
        output_dir="unused",
        per_device_train_batch_size=16,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8]).train()
    torch.save(model.state_dict(), out)


if __name__ == "__main__":
    main()
