"""The examples of the README and of the pages in docs/ run as they are printed, and the pages are short to read."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A comment before an example names the file that runs it, where that is not this one: it needs other packages, say.
EXAMPLES = [
    pytest.param(example, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (where, example) in enumerate(
        re.findall(r"(?:<!-- ([^\n]*) -->\n)?```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    )
    if not where or Path(__file__).name in where
]
MOST_LINES, MOST_LINES_OF_A_PARAGRAPH = 150, 5


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


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN the names an example uses WHEN it runs THEN it trains: the weights have changed."""
    pytest.importorskip("transformers", reason="the pages show the Trainer too")
    monkeypatch.chdir(tmp_path)
    names = names_of_a_script(tmp_path)
    if "Trainer(" in example:
        names["model"] = names["language_model"]
    model = names["model"]
    assert isinstance(model, nn.Module)
    before = [p.detach().clone() for p in model.parameters()]
    exec(compile(example, "example", "exec"), names)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_there_are_examples() -> None:
    """GIVEN the pages WHEN examples are collected THEN the README's two and three more are, or nothing was tested."""
    assert sum(str(example.id).startswith("README") for example in EXAMPLES) >= 2
    assert len(EXAMPLES) >= 5


def test_what_runs_an_example_that_is_not_run_here_is_there() -> None:
    for page in PAGES:
        for named in re.findall(r"<!-- runs in [^:\n]*: ([^\n]*) -->\n```python", page.read_text()):
            assert (ROOT / named).exists(), named


def paragraphs(page: Path) -> list[str]:
    """Runs of prose; each item of a list is one. Tables, headings and code are none."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?=\s*(?:[-*]|\d+\.) )", "\n", text, flags=re.MULTILINE)
    return [
        part for part in re.split(r"\n\s*\n", text) if part.strip() and not part.lstrip().startswith(("#", "|", "<!--"))
    ]


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_no_paragraph_is_long(page: Path) -> None:
    assert [part for part in paragraphs(page) if len(part.splitlines()) > MOST_LINES_OF_A_PARAGRAPH] == []


def test_the_front_page_is_short_and_leads_to_every_other_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert [page.name for page in PAGES[1:] if f"](docs/{page.name})" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
    for link in links:
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        headings = (
            [
                re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
                for line in target.read_text().splitlines()
                if line.startswith("#")
            ]
            if target.suffix == ".md"
            else []
        )
        assert not heading or heading in headings, link
