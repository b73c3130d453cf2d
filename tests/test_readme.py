"""The examples of the README run as they are printed."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def names_of_a_script(folder: Path) -> dict[str, object]:
    """What the examples take for granted: a model, its data, and transformers' Trainer."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    language_model = LlamaForCausalLM(config)
    dataset = [{"input_ids": torch.arange(16) % 64, "labels": torch.arange(16) % 64}] * 6
    args = TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    loader = [
        {"input": torch.randn(4, 8), "label": torch.randint(0, 4, (4,)), "user": torch.randint(0, 20_000_000, (4,))}
        for _ in range(3)
    ]
    return {
        "language_model": language_model,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": loader,
        "loss_function": nn.CrossEntropyLoss(),
        "torch": torch,
        "Trainer": Trainer,
        "args": args,
        "dataset": dataset,
    }


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN the names an example uses WHEN it runs THEN it trains: the weights have changed."""
    pytest.importorskip("transformers", reason="the README shows the Trainer too")
    monkeypatch.chdir(tmp_path)
    names = names_of_a_script(tmp_path)
    if "Trainer(" in EXAMPLES[number]:
        names["model"] = names["language_model"]
    model = names["model"]
    assert isinstance(model, nn.Module)
    before = [p.detach().clone() for p in model.parameters()]
    exec(compile(EXAMPLES[number], f"README example {number}", "exec"), names)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_there_are_examples() -> None:
    """GIVEN the README WHEN its examples are collected THEN there are some, or nothing above was tested."""
    assert len(EXAMPLES) >= 2
