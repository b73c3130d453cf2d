"""Fused kernels in models as they are: found by structure, checked, reported, undone."""

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from memwall.apply.kernels.patched import PatchedKernels, patch_kernels
from memwall.errors import ApplyError

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
KEYS = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tokens_model(name: str, **options: Any) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    def make() -> tuple[nn.Module, dict[str, Tensor]]:
        import transformers

        config = getattr(transformers, f"{name}Config")(**options)
        kind = {"Bert": "BertForMaskedLM", "T5": "T5ForConditionalGeneration", "GPT2": "GPT2LMHeadModel"}
        model = getattr(transformers, kind.get(name, f"{name}ForCausalLM"))(config)
        ids = torch.randint(3, 60, (2, 7))
        return model, {"input_ids": ids, "labels": ids}

    return make


T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 64,
    "decoder_start_token_id": 0,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 64,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Each model, and how many modules run which kernel afterwards.
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Tensor]]], dict[str, int]]] = {
    "llama": (tokens_model("Llama", **SMALL, **KEYS), {"rms_norm (llama)": 5, "swiglu": 2}),
    "qwen3": (tokens_model("Qwen3", **SMALL, **KEYS), {"rms_norm (llama)": 9, "swiglu": 2}),
    "mistral": (tokens_model("Mistral", **SMALL, **KEYS), {"rms_norm (llama)": 5, "swiglu": 2}),
    "gemma": (tokens_model("Gemma", **SMALL, **KEYS), {"rms_norm (gemma)": 5, "geglu": 2}),
    "phi3": (tokens_model("Phi3", **SMALL, pad_token_id=0), {"rms_norm (llama)": 5, "swiglu": 2}),
    "t5": (tokens_model("T5", **T5, feed_forward_proj="gated-gelu"), {"rms_norm (llama)": 12, "geglu": 4}),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    make, kernels = MODELS[request.param]
    model, batch = make()
    with torch.no_grad():
        # Fresh norms multiply by one: a kernel without the weight would pass.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model, batch, kernels


def step(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Loss and gradients, with the same dropout masks each time."""
    torch.manual_seed(1)
    loss = model(**batch).loss
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return [loss.detach(), *(g for g in gradients if g is not None)]


def counted(patched: PatchedKernels) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in patched.rows:
        if row.is_replaced:
            found[row.kernel] = found.get(row.kernel, 0) + 1
    return found


@pytest.mark.requires("transformers")
def test_a_model_trains_as_before_and_is_itself_again_afterwards(case: Any) -> None:
    model, batch, kernels = case
    keys, before = list(model.state_dict()), step(model, batch)
    patched = patch_kernels(model)
    assert counted(patched) == kernels, patched.table()
    found = step(model, batch)
    assert list(model.state_dict()) == keys
    for ours, own in zip(found, before, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-3, atol=1e-5)
    patched.undo()
    assert not [module for module in model.modules() if "forward" in module.__dict__]
    assert all(torch.equal(a, b) for a, b in zip(step(model, batch), before, strict=True))


HEADED = {
    **{name: make for name, (make, _) in MODELS.items()},
    "phi": tokens_model("Phi", **SMALL, pad_token_id=0),
    "gpt2": tokens_model("GPT2", **GPT2),
    "bert": tokens_model("Bert", **SMALL),
    "llama-tied": tokens_model("Llama", **SMALL, **KEYS, tie_word_embeddings=True),
    "gemma2": tokens_model("Gemma2", **SMALL, **KEYS),
    "granite": tokens_model("Granite", **SMALL, **KEYS, logits_scaling=8.0),
    "cohere": tokens_model("Cohere", **SMALL, **KEYS),
}


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("name", HEADED)
def test_the_loss_of_a_model_needs_no_logits_and_copies_are_models_without_kernels(name: str) -> None:
    torch.manual_seed(0)
    model, batch = HEADED[name]()
    own = step(model, batch)
    patched = patch_kernels(model, chunk_rows=4)
    found = step(model, batch)
    assert (patched.losses.num_losses, patched.losses.asked_by) == (1, "")
    for ours, plain in zip(found, own, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-5)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(step(other, batch), own, strict=True))
    patched.undo()
    assert all(torch.equal(a, b) for a, b in zip(step(model, batch), own, strict=True))


class Rms(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Mean(Rms):
    """Looks like an RMSNorm and is none."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True))


class Centered(Rms):
    """A LayerNorm without a bias, as Cohere's: of a wide row with a mean near zero it gives what an RMSNorm does."""

    def __init__(self) -> None:
        super().__init__(8192)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (8192,), self.weight, eps=self.eps)


class Mlp(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act_fn = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DropsLast(Mlp):
    """Its dropout stands behind the last layer, where the fused forward has none."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class Swapped(Mlp):
    """The activation is on the other branch, and the last layer begins with zeros, as of a residual branch."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_peoples_modules_are_found_by_what_they_do(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Rms(), Mlp(nn.SiLU()), Mlp(nn.GELU("tanh")), nn.RMSNorm(8, eps=1e-6)).to(dtype)
    patched = patch_kernels(model)
    kernels = [row.kernel for row in patched.rows]
    assert kernels == ["rms_norm (llama)", "swiglu", "geglu", "rms_norm (plain)"]
    assert patched.num_replaced == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torchs_rms_norm_without_an_epsilon_has_torchs(dtype: torch.dtype) -> None:
    """Rows so small that it shows."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.RMSNorm(64)).to(dtype), (1e-4 * torch.randn(5, 64)).to(dtype)
    expected = model(x)
    assert patch_kernels(model).num_replaced == 1
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(model(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Mean(), r"its result differs by"),
        (Centered().bfloat16(), r"its result differs by"),
        (DropsLast().eval(), r"its result differs by"),
        (Swapped(), r"its gradients are zero on a small input, which tells nothing of its forward"),
        (Mlp(nn.SiLU()).to("meta"), r"has no values to check against"),
    ],
)
def test_what_a_kernel_does_not_reproduce_is_left_alone_and_said(
    module: nn.Module, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        patched = patch_kernels(nn.Sequential(module))
    (row,) = patched.rows
    assert not row.is_replaced
    assert reason in row.reason
    assert "forward" not in module.__dict__
    assert "no module of Sequential runs a fused kernel" in caplog.text
    assert f"left alone: {row.reason}" in patched.table()


def test_what_is_left_alone_beside_others_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        patched = patch_kernels(nn.Sequential(Rms(), Mean(), Mean()))
    assert patched.num_replaced == 1
    (said,) = caplog.messages
    assert said.startswith("some modules of Sequential run no fused kernel:\n   2 x Mean -> rms_norm (llama): left")
    assert "Rms ->" not in said


@pytest.mark.parametrize("module", [nn.Linear(8, 8), Mlp(nn.ReLU()), nn.LayerNorm(8), nn.BatchNorm1d(8)])
def test_what_looks_like_no_kernel_has_no_row(module: nn.Module) -> None:
    assert patch_kernels(nn.Sequential(module)).rows == ()


def test_the_check_leaves_every_module_in_its_mode() -> None:
    model = nn.Sequential(Mlp(nn.SiLU()), DropsLast().eval(), Rms().eval())
    before = [module.training for module in model.modules()]
    assert patch_kernels(model).num_replaced == 2
    assert [module.training for module in model.modules()] == before


def test_no_module_is_patched_twice() -> None:
    model = nn.Sequential(Rms())
    first = patch_kernels(model)
    second = patch_kernels(model)
    assert second.num_replaced == 0
    assert second.rows[0].reason == "its forward was replaced already"
    second.undo()
    assert "forward" in model[0].__dict__
    first.undo()
    assert "forward" not in model[0].__dict__


def test_undo_leaves_what_others_have_put_over_a_forward_which_then_calls_the_modules_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(Rms(), nn.RMSNorm(8))
    patched = patch_kernels(model)
    kernel = model[0].forward
    foreign = model[0].forward = lambda x: kernel(x) + 1
    counts = patched.num_calls
    patched.undo()
    assert model[0].forward is foreign
    x = torch.randn(2, 8)
    assert torch.equal(model[0](x), Rms.forward(model[0], x) + 1)
    assert counts == {"0": 0, "1": 0}
    assert "forward" not in model[1].__dict__
    assert "Rms.forward was changed by somebody else after memwall" in caplog.text


def test_copies_and_pickles_are_models_without_kernels() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.RMSNorm(8), nn.RMSNorm(8)), torch.randn(3, 8)
    own = model(x)
    patch_kernels(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), own)
        with torch.no_grad():
            other[0].weight.zero_()
        assert not torch.equal(other(x), own)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lm_head = nn.RMSNorm(8), nn.Linear(8, 16)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.lm_head(self.norm(x)), target)


def shard(model: Headed) -> None:
    """By FSDP2, which frees the head's weight after the head's forward."""
    mesh = init_device_mesh("cpu", (1,))
    for module in (model.norm, model.lm_head, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_model_is_left_alone_and_said() -> None:
    model = Headed()
    shard(model)
    patched = patch_kernels(model, chunk_rows=4)
    assert patched.num_replaced == 0
    assert "left alone: its parameter weight is sharded" in patched.table()


@pytest.mark.usefixtures("one_rank")
def test_a_head_that_is_sharded_afterwards_is_refused() -> None:
    """Liger #332; TRL #4544, #3368, #6372: its weight read where it is not gathered."""
    model = Headed()
    patch_kernels(model, chunk_rows=4)
    shard(model)
    with pytest.raises(
        ApplyError, match="the weight of the head went away before its loss was computed, as where FSDP"
    ):
        model(torch.randn(6, 8), torch.arange(6))


def test_weights_are_read_inside_the_modules_own_call() -> None:
    """FSDP and ZeRO-3 gather them in a hook before forward, and free them after it."""
    model = nn.Sequential(nn.RMSNorm(8))
    patch_kernels(model)
    x, order = torch.randn(3, 8), []
    model[0].register_forward_pre_hook(lambda module, args: order.append(module.weight.fill_(2.0)))
    with torch.no_grad():
        found = model(x)
    assert len(order) == 1
    torch.testing.assert_close(found, 2.0 * nn.functional.rms_norm(x, (8,)))
