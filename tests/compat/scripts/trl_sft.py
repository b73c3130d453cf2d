"""TRL's SFTTrainer gives a small Llama LoRA adapters and fine-tunes them, with gradient accumulation."""

import hashlib
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
words = ["<pad>", "<eos>", "<unk>", *(f"word{number}" for number in range(500))]
vocabulary = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)

chance = random.Random(0)
texts = [" ".join(chance.choices(words[3:], k=chance.randint(60, 120))) for _ in range(64)]
data = Dataset.from_dict({"text": texts})

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words),
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=20,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        "out",
        per_device_train_batch_size=10,
        gradient_accumulation_steps=2,
        max_length=128,
        max_steps=2,
        learning_rate=1e-3,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
digest = hashlib.sha256()
for p in trainer.model.parameters():
    if p.requires_grad:
        digest.update(p.detach().float().numpy())
print("weights", digest.hexdigest())
