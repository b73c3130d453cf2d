"""BERT classifies made-up sentences of very different lengths; each batch is padded to its own longest one."""

import argparse
import time

import torch
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="bert.pt", help="where the trained weights go")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
args = parser.parse_args()
num_layers, width, batch, longest = (4, 128, 24, 128) if args.tiny else (6, 256, 8, 256)
num_steps = 5 if args.tiny else args.steps
torch.manual_seed(0)
words = torch.Generator().manual_seed(1)


def sentences():
    """A batch of sentences whose class is whether the word 7 is in them."""
    lengths = torch.randint(longest // 4, longest + 1, (batch,), generator=words)
    tokens = torch.zeros(batch, int(lengths.max()), dtype=torch.long)
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        row[:length] = torch.randint(8, 2000, (length,), generator=words)
    labels = torch.randint(2, (batch,), generator=words)
    tokens[labels == 1, 3] = 7
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


model = BertForSequenceClassification(
    BertConfig(
        vocab_size=2000, hidden_size=width, num_hidden_layers=num_layers, num_attention_heads=4,
        intermediate_size=4 * width, max_position_embeddings=longest,
    )
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
schedule = get_linear_schedule_with_warmup(optimizer, 2, num_steps)
model.train()
for step in range(num_steps):
    begin = time.perf_counter()
    batch_of_texts = sentences()
    loss = model(**batch_of_texts).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    length = batch_of_texts["input_ids"].shape[1]
    print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s, {length} tokens", flush=True)
torch.save(model.state_dict(), args.out)
