"""The trainer of sentence-transformers, made of transformers', trains a small BERT on pairs of texts."""

import hashlib
import random

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

torch.manual_seed(0)
words = ["[PAD]", "[UNK]", *(f"word{number}" for number in range(1000))]
vocabulary = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]").save_pretrained("base")
BertModel(
    BertConfig(
        vocab_size=len(words),
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
).save_pretrained("base")

transformer = models.Transformer("base", max_seq_length=128)
model = SentenceTransformer(modules=[transformer, models.Pooling(192)], device="cpu")
chance = random.Random(0)
texts = [" ".join(chance.choices(words[2:], k=chance.randint(40, 90))) for _ in range(144)]
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        "out",
        per_device_train_batch_size=24,
        max_steps=3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=Dataset.from_dict({"anchor": texts[:72], "positive": texts[72:]}),
    loss=losses.MultipleNegativesRankingLoss(model),
)
trainer.train()
digest = hashlib.sha256()
for p in model.parameters():
    digest.update(p.detach().numpy())
print("weights", digest.hexdigest())
