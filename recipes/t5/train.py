"""T5 learns by transformers' Trainer to write sentences backwards; labels are padded with -100."""

import argparse
import time

import torch
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="t5.pt", help="where the trained weights go")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
args = parser.parse_args()
num_layers, width, batch, length = (2, 128, 16, 96) if args.tiny else (5, 192, 16, 160)
num_steps = 4 if args.tiny else args.steps
torch.manual_seed(0)


class Reversed(torch.utils.data.Dataset):
    """Sentences of one length, and what the model is to write: each backwards, cut somewhere."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(2, 1000, (length,), generator=drawn)
        labels = tokens.flip(0)
        labels[length - index % 16 :] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones(length, dtype=torch.long), "labels": labels}


class Clock(TrainerCallback):
    """Prints each step's loss and seconds."""

    def on_step_begin(self, *_, **__):
        self.begin = time.perf_counter()

    def on_log(self, _, state, __, logs=None, **___):
        if "loss" in logs:
            seconds = time.perf_counter() - self.begin
            print(f"step {state.global_step - 1}: loss {float(logs['loss']):.6f}, {seconds:.3f} s", flush=True)


model = T5ForConditionalGeneration(
    T5Config(
        vocab_size=1000, d_model=width, d_kv=32, d_ff=4 * width, num_layers=num_layers, num_heads=4,
        decoder_start_token_id=0,
    )
)  # fmt: skip
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out", max_steps=num_steps, per_device_train_batch_size=batch, learning_rate=3e-4, logging_steps=1,
        report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
    ),
    train_dataset=Reversed(),
    callbacks=[Clock()],
)  # fmt: skip
trainer.train()
torch.save(model.state_dict(), args.out)
