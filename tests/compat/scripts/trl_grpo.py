"""TRL's GRPOTrainer writes answers to prompts and learns by a reward of its own: generation and training in turns."""

import hashlib

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

torch.manual_seed(0)
words = ["<pad>", "<eos>", "<unk>", *(f"word{number}" for number in range(500))]
vocabulary = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
)


def reward(completions, **_):
    """Rewards answers of many different words."""
    return [len(set(text.split())) / 32 for text in completions]


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words),
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=24,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=GRPOConfig(
        "out",
        per_device_train_batch_size=32,
        num_generations=4,
        max_completion_length=32,
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
    train_dataset=Dataset.from_dict({"prompt": [f"word{3 * n} word{3 * n + 1} word{3 * n + 2}" for n in range(32)]}),
    processing_class=tokenizer,
)
trainer.train()
digest = hashlib.sha256()
for p in trainer.model.parameters():
    digest.update(p.detach().float().numpy())
print("weights", digest.hexdigest())
