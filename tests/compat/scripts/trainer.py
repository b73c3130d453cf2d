"""The Trainer of transformers fine-tunes a small BERT, evaluates and saves after each epoch."""

import hashlib

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)


class Reviews(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        words = torch.randint(5, 2000, (128,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": index % 2}


config = BertConfig(
    vocab_size=2000, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024
)
model = BertForSequenceClassification(config)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    num_train_epochs=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Reviews(48), eval_dataset=Reviews(32))
trainer.train()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
