"""TRL's DPOTrainer trains LoRA adapters on pairs of answers; the model without them is the reference."""

import hashlib
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

torch.manual_seed(0)
words = ["<pad>", "<eos>", "<unk>", *(f"word{number}" for number in range(500))]
vocabulary = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)

chance = random.Random(0)


def sentence(least, most):
    return " ".join(chance.choices(words[3:], k=chance.randint(least, most)))


pairs = [(sentence(20, 40), " " + sentence(30, 80), " " + sentence(30, 80)) for _ in range(32)]
data = Dataset.from_dict(dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*pairs, strict=True)), strict=True)))

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words),
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=36,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
)
trainer = DPOTrainer(
    model=model,
    args=DPOConfig(
        "out",
        per_device_train_batch_size=6,
        max_length=128,
        max_steps=3,
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
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
digest = hashlib.sha256()
for p in trainer.model.parameters():
    if p.requires_grad:
        digest.update(p.detach().float().numpy())
print("weights", digest.hexdigest())
