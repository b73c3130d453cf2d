"""The examples of docs/frameworks.md run as they are printed, with the frameworks that they name."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

PAGE = Path(__file__).parents[2] / "docs/frameworks.md"
MARK = f"<!-- runs in make test-frameworks: tests/integrations/{Path(__file__).name} -->\n```python\n"

WORDS = ["<pad>", "<eos>", *(f"word{number}" for number in range(62))]


def example(word: str) -> str:
    found = [
        text for text in re.findall(re.escape(MARK) + "(.*?)```", PAGE.read_text(), flags=re.DOTALL) if word in text
    ]
    assert len(found) == 1, word
    return found[0]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def tokenizer_of_words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<eos>"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def sft(folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = tokenizer_of_words()
    args = SFTConfig(
        str(folder), max_steps=2, per_device_train_batch_size=2, max_length=16, bf16=False, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, gradient_checkpointing=False,
    )  # fmt: skip

    def trainer(**settings: Any) -> Any:
        return SFTTrainer(processing_class=tokenizer, **settings)

    return {
        "SFTTrainer": trainer,
        "model": llama(),
        "args": args,
        "data": Dataset.from_dict({"text": [" ".join(WORDS[2:20])] * 8}),
    }


def peft(folder: Path) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    batch = torch.arange(16).reshape(1, 16)
    loader = [{"input_ids": batch, "labels": batch}] * 2
    return {
        "get_peft_model": get_peft_model, "LoraConfig": LoraConfig, "model": (base := llama()), "base": base,
        "loader": loader, "torch": torch,
    }  # fmt: skip


def timm_loop(folder: Path) -> dict[str, Any]:
    import timm
    import timm.optim
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    shape = {"img_size": 16, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 4}
    return {
        "timm": timm, "ModelEmaV3": ModelEmaV3, "dispatch_clip_grad": dispatch_clip_grad, "torch": torch,
        "model": timm.create_model("vit_tiny_patch16_224", pretrained=False, **shape),
        "loss_function": nn.CrossEntropyLoss(),
        "loader": [(torch.randn(2, 3, 16, 16), torch.tensor([0, 3]))] * 2,
    }  # fmt: skip


def lightning_fit(folder: Path) -> dict[str, Any]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    loader = torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4)
    return {"lightning": lightning, "model": (module := Module()), "module": module, "loader": loader}


def diffusers_loop(folder: Path) -> dict[str, Any]:
    from accelerate import Accelerator
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(32,), down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )  # fmt: skip
    return {
        "accelerator": Accelerator(cpu=True), "model": model, "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": torch.utils.data.DataLoader(torch.randn(4, 3, 8, 8), batch_size=2),
        "noises": DDPMScheduler(num_train_timesteps=100), "torch": torch, "F": nn.functional,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "names"),
    [
        pytest.param("SFTTrainer(", sft, marks=pytest.mark.requires("trl", "datasets")),
        pytest.param("get_peft_model(", peft, marks=pytest.mark.requires("peft")),
        pytest.param("ModelEmaV3(", timm_loop, marks=pytest.mark.requires("timm", "torchvision")),
        pytest.param("LightningCallback(", lightning_fit, marks=pytest.mark.requires("lightning")),
        pytest.param("MemwallPlugin(", diffusers_loop, marks=pytest.mark.requires("diffusers")),
    ],
)
def test_an_example_trains(
    word: str, names: Callable[[Path], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = names(tmp_path)
    model = found["model"]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    exec(compile(example(word), word, "exec"), found)
    moved = [
        name
        for name, value in found["model"].named_parameters()
        # PEFT has its own names, and second factors that begin as zeros.
        if ((name in before and not torch.equal(value, before[name])) or ("lora_B" in name and value.any()))
    ]
    assert moved


def test_each_example_of_the_page_is_run() -> None:
    assert PAGE.read_text().count("```python\n") == PAGE.read_text().count(MARK) == 5


@pytest.mark.slow
@pytest.mark.requires("trl", "datasets")
def test_grpo_writes_answers_and_learns_from_them_to_the_same_bits(tmp_path: Path) -> None:
    """GIVEN a trainer that generates between its steps WHEN it has a budget THEN each step is counted, and planned."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from memwall.integrations import MemwallCallback

    def trained(*callbacks: Any) -> list[Tensor]:
        torch.manual_seed(0)
        args = GRPOConfig(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, num_generations=2, max_completion_length=8,
            bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, learning_rate=1e-2,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=llama(),
            reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [f"word{number} word{number + 1}" for number in range(16)]}),
            processing_class=tokenizer_of_words(),
            callbacks=list(callbacks),
        )
        trainer.train()
        return [parameter.detach() for parameter in trainer.model.parameters()]

    callback = MemwallCallback(budget="20GiB")
    assert all(map(torch.equal, trained(callback), trained()))
    assert callback.report().measured.steps == 3
