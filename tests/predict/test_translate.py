"""From a CPU step to the step of a CUDA device: every rule with its switch, in bytes that can be added up by hand."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.versions import profile_for
from memwall.predict.cuda_attention import AttentionCall, attention_kernel
from memwall.predict.cuda_workspaces import FORMULAS
from memwall.predict.curve import live_peak_bytes
from memwall.predict.device import MARGIN_SHARE, DeviceModel, as_first, margin_bytes, step_peaks
from memwall.predict.hardware import Hardware, hardware_named
from memwall.predict.roofline import Roofline
from memwall.predict.translate import RULES, not_modelled, recording_for, translated
from memwall.trace.fake import record_fake
from memwall.trace.record import record
from memwall.trace.records import Step, Trace
from memwall.trace.work import OpWork
from memwall.trace.workload import Workload

MIB = 1 << 20
BATCH, HEADS, TOKENS, SIZE = 2, 4, 80, 16
WIDTH = HEADS * SIZE


pytestmark = pytest.mark.usefixtures("one_thread")


class Attention(nn.Module):
    """Self-attention; queries, keys and values lie in memory as [batch, tokens, heads, size]."""

    def __init__(self, key_heads: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.key_heads, self.options = key_heads, options
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, key_heads * SIZE), nn.Linear(WIDTH, key_heads * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).view(BATCH, TOKENS, -1, SIZE).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, **self.options)
        return self.out(mixed.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))


def in_dtype(make: Callable[[], Any], dtype: torch.dtype) -> Any:
    """What a factory makes where tensors have this dtype by default: a module of fake tensors can't be cast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def workload_of(
    model: Callable[[], nn.Module],
    batch: Callable[[], Tensor],
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any, Any], Tensor] = lambda model, batch: model(batch).float().sum(),
) -> Workload:
    return Workload(
        model=lambda: in_dtype(model, dtype),
        batch=lambda: in_dtype(batch, dtype),
        loss=loss,
        optimizer=optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    )


def recorded(workload: Workload, device: str, *without: str) -> Trace:
    """A workload as a device would run it, with some rules left out."""
    hardware = hardware_named(device)
    recording = recording_for(hardware, without=without)
    trace = record_fake(
        workload,
        target="cpu" if "foreach-optimizer" in without else "cuda",
        workspaces=recording.workspaces,
        choices=recording.choices(),
    )
    return translated(trace, hardware, autocast=recording.autocast, without=without)


def attending(dtype: torch.dtype, device: str, *without: str, **options: Any) -> Trace:
    workload = workload_of(lambda: Attention(**options), lambda: torch.ones(BATCH, TOKENS, WIDTH), dtype)
    return recorded(workload, device, *without)


def numbers_of(trace: Trace, step: Step, name: str) -> list[int]:
    return [number for number, op in enumerate(step.ops) if trace.names[op.name] == f"aten.{name}.default"]


def workspace_of(trace: Trace, name: str) -> int:
    """Bytes that the one call of an operator allocates besides its results."""
    step = trace.steps[-1]
    (number,) = numbers_of(trace, step, name)
    own = [
        storage.nbytes
        for index, storage in enumerate(step.storages)
        if storage.birth == number and index not in step.ops[number].outputs
    ]
    return sum(own)


def new_bytes(trace: Trace, name: str) -> list[int]:
    """Bytes of what the one call of an operator returns anew."""
    step = trace.steps[-1]
    (number,) = numbers_of(trace, step, name)
    return [step.storages[i].nbytes for i in step.ops[number].outputs if step.storages[i].birth == number]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_each_rule_has_a_name_of_its_own_and_a_source() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert all("/" in rule.source or "moved there" in rule.source for rule in RULES)
    assert set(FORMULAS) <= set(names)


def test_a_switch_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^there is no translation rule 'flash'; there are attention-kernel, dropout"):
        recording_for(hardware_named("l4"), without=("flash",))


# -- which attention kernel --------------------------------------------------------------------------------------------


def call(dtype: str = "bfloat16", size: int = 64, **changes: Any) -> AttentionCall:
    shape = (2, 8, 128, size)
    return AttentionCall(**{"dtype": dtype, "query": shape, "key": shape, "value": shape, **changes})


H100, A100, L4, T4, V100, B200, RTX_5090 = (9, 0), (8, 0), (8, 9), (7, 5), (7, 0), (10, 0), (12, 0)
MASK = (2, 1, 128, 128)
SHORT = (2, 8, 64, 64)
FEW_HEADS = (2, 2, 128, 64)


@pytest.mark.parametrize(
    ("capability", "asked", "kernel"),
    [
        (H100, call(), "cudnn"),
        (B200, call("float16"), "cudnn"),
        (H100, call(mask=MASK), "cudnn"),
        (H100, call(mask=MASK, mask_needs_gradient=True), "efficient"),
        (H100, call(mask=(2, 3, 128, 128)), "efficient"),
        (H100, call(dropout=0.1), "flash"),  # cuDNN counts in sixteenths
        (H100, call(dropout=0.125), "cudnn"),
        (H100, call(size=256), "flash"),
        (H100, call(size=100), "flash"),
        (H100, call(size=512), "efficient"),
        (H100, call("float32"), "efficient"),
        (H100, call("float64"), "math"),
        (H100, call(query=(8, 128, 64), key=(8, 128, 64), value=(8, 128, 64)), "math"),
        (H100, call(is_last_dim_dense=False), "math"),
        (H100, call(key=FEW_HEADS, value=FEW_HEADS, enable_gqa=True), "cudnn"),
        (A100, call(), "flash"),
        (A100, call(mask=MASK), "efficient"),
        (A100, call(is_causal=True), "flash"),
        (A100, call(is_causal=True, key=SHORT, value=SHORT), "efficient"),
        (A100, call(size=256), "flash"),
        (A100, call(key=FEW_HEADS, value=FEW_HEADS, enable_gqa=True), "flash"),
        (A100, call(key=FEW_HEADS, value=FEW_HEADS, enable_gqa=True, mask=MASK), "math"),
        (A100, call("float32", key=FEW_HEADS, value=FEW_HEADS, enable_gqa=True), "math"),
        (A100, call("float32", size=66), "math"),  # not a multiple of 4
        (L4, call(size=256), "flash"),
        (L4, call(size=256, dropout=0.1), "efficient"),
        (L4, call(size=224), "efficient"),
        (L4, call(size=224, needs_gradient=False), "flash"),
        (RTX_5090, call(), "flash"),
        (T4, call("float16"), "efficient"),
        (T4, call("float16", size=68), "math"),  # its matrix units want multiples of 8
        (T4, call("float32", size=66), "efficient"),
        (V100, call("bfloat16"), "math"),
    ],
)
def test_the_kernel_is_the_one_torch_would_take(capability: tuple[int, int], asked: AttentionCall, kernel: str) -> None:
    assert attention_kernel(asked, capability) == kernel


def test_a_kernel_that_is_switched_off_is_not_taken() -> None:
    assert attention_kernel(call(), H100, frozenset(("flash", "math"))) == "flash"
    assert attention_kernel(call(), H100, frozenset(("math",))) == "math"


@pytest.mark.parametrize(
    ("dtype", "device", "operator", "logsumexp_rows"),
    [
        (torch.bfloat16, "h100-80gb", "_scaled_dot_product_cudnn_attention", TOKENS),
        (torch.bfloat16, "a100-80gb", "_scaled_dot_product_flash_attention", TOKENS),
        (torch.float32, "a100-80gb", "_scaled_dot_product_efficient_attention", 96),  # padded to 32
    ],
)
def test_attention_saves_what_the_device_kernel_saves(
    dtype: torch.dtype, device: str, operator: str, logsumexp_rows: int
) -> None:
    trace = attending(dtype, device, is_causal=True)
    result, logsumexp, *seeds = sorted(new_bytes(trace, operator), reverse=True)
    assert result == BATCH * TOKENS * WIDTH * dtype.itemsize
    assert logsumexp == 4 * BATCH * HEADS * logsumexp_rows
    assert sum(seeds) <= 32
    assert numbers_of(trace, trace.steps[-1], f"{operator}_backward")


def test_without_the_rule_attention_stays_the_cpu_kernel() -> None:
    trace = attending(torch.bfloat16, "a100-80gb", "attention-kernel", is_causal=True)
    assert numbers_of(trace, trace.steps[-1], "_scaled_dot_product_flash_attention_for_cpu")
    assert any("the device's attention kernel" in line for line in not_modelled(trace, hardware_named("a100-80gb")))


def test_a_mask_of_truths_becomes_numbers_and_is_saved() -> None:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    trace = attending(torch.float32, "a100-80gb", attn_mask=mask)
    assert numbers_of(trace, trace.steps[-1], "_scaled_dot_product_efficient_attention")
    assert 4 * TOKENS * TOKENS in [save.nbytes // (BATCH * HEADS) for save in trace.steps[-1].saved]


def test_grouped_queries_in_float32_are_written_out() -> None:
    """GIVEN fewer keys than queries in float32 THEN no fused kernel takes them, and the weights exist in full."""
    trace = attending(torch.float32, "a100-80gb", key_heads=2, enable_gqa=True)
    weights_bytes = 4 * BATCH * HEADS * TOKENS * TOKENS
    assert not any("attention" in name for name in trace.names)
    assert any(storage.nbytes == weights_bytes for storage in trace.steps[-1].storages)


def test_multihead_attention_of_torch_takes_the_device_kernel_as_well() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    trace = recorded(workload_of(Encoder, lambda: torch.ones(BATCH, TOKENS, WIDTH), torch.bfloat16), "a100-80gb")
    assert numbers_of(trace, trace.steps[-1], "_scaled_dot_product_flash_attention")


def test_torch_has_its_own_functions_back_afterwards() -> None:
    before = (F.scaled_dot_product_attention, F.dropout, torch.autocast.__init__)
    choices = recording_for(hardware_named("l4")).choices()
    with pytest.raises(ZeroDivisionError), choices:
        F.dropout(torch.ones(4), 0.5) if F.dropout is before[1] else 1 / 0
    assert (F.scaled_dot_product_attention, F.dropout, torch.autocast.__init__) == before


# -- workspaces --------------------------------------------------------------------------------------------------------


def test_flash_backward_sums_in_float32() -> None:
    """80 tokens rounded to 128, heads of 16 to 32; and a row of sums."""
    expected = 4 * BATCH * HEADS * 128 * (32 + 1)
    name = "_scaled_dot_product_flash_attention_backward"
    assert workspace_of(attending(torch.bfloat16, "a100-80gb"), name) == expected
    assert workspace_of(attending(torch.bfloat16, "a100-80gb", "flash-backward"), name) == 0


def test_flash_backward_has_a_gradient_per_query_head() -> None:
    trace = attending(torch.bfloat16, "a100-80gb", key_heads=2, enable_gqa=True)
    expanded = 2 * BATCH * TOKENS * HEADS * SIZE * 2
    expected = 4 * BATCH * HEADS * 128 * (32 + 1) + expanded
    assert workspace_of(trace, "_scaled_dot_product_flash_attention_backward") == expected


def test_efficient_backward_sums_in_tiles() -> None:
    """Two tiles of 64 x 64 for each head, and a number per row."""
    tiles = 2 * BATCH * HEADS * (16 + 4 * 64 * 64)
    name = "_scaled_dot_product_efficient_attention_backward"
    assert workspace_of(attending(torch.float32, "a100-80gb"), name) == tiles + 4 * BATCH * HEADS * TOKENS
    assert workspace_of(attending(torch.float32, "a100-80gb", "efficient-backward"), name) == 0


def test_cudnn_backward_sums_in_float32() -> None:
    expected = 4 * BATCH * HEADS * TOKENS * (SIZE + 1)
    name = "_scaled_dot_product_cudnn_attention_backward"
    trace = attending(torch.bfloat16, "h100-80gb")
    assert workspace_of(trace, name) == expected
    assert workspace_of(attending(torch.bfloat16, "h100-80gb", "cudnn-backward"), name) == 0
    assert any("cuDNN's attention" in line for line in not_modelled(trace, hardware_named("h100-80gb")))


@pytest.mark.parametrize(("tokens", "num_segments"), [(3072, None), (4096, 1000)])
def test_an_embedding_with_many_indices_sorts_them(tokens: int, num_segments: int | None) -> None:
    def traced(*without: str) -> Trace:
        workload = workload_of(
            lambda: nn.Embedding(1000, 32), lambda: torch.zeros(1, tokens, dtype=torch.int64), torch.bfloat16
        )
        return recorded(workload, "a100-80gb", *without)

    expected = 0
    if num_segments is not None:
        partial = tokens // 10 + num_segments
        expected = 8 * (2 * tokens + tokens + 2 * num_segments + partial) + 4 * 32 * partial
    found = workspace_of(traced(), "embedding_dense_backward")
    # The gradient of a sum is one number seen everywhere: it is made contiguous first.
    assert found - expected in (0, 2 * tokens * 32)
    assert workspace_of(traced("embedding-backward"), "embedding_dense_backward") == 0


def test_the_backward_of_indexing_sorts_positions() -> None:
    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50, 8))

        def forward(self, rows: Tensor) -> Tensor:
            return self.weight[rows] * 2

    def sorted_bytes(*without: str) -> int:
        workload = workload_of(Picked, lambda: torch.zeros(30, dtype=torch.int64))
        trace = recorded(workload, "a100-80gb", *without)
        step = trace.steps[-1]
        puts = [n for n, op in enumerate(step.ops) if "index_put" in trace.names[op.name]]
        assert len(puts) == 1
        outputs = step.ops[puts[0]].outputs
        return sum(s.nbytes for i, s in enumerate(step.storages) if s.birth == puts[0] and i not in outputs)

    assert sorted_bytes() == 4 * 8 * 30
    assert sorted_bytes("index-backward") == 0


# -- dropout, optimizers, autocast -------------------------------------------------------------------------------------


def test_dropout_saves_a_mask_of_bools() -> None:
    def saved(*without: str) -> set[int]:
        workload = workload_of(lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)), lambda: torch.ones(4, 32))
        trace = recorded(workload, "a100-80gb", *without)
        step = trace.steps[-1]
        return {save.nbytes for save in step.saved if step.storages[save.storage].category == "activation"}

    assert 4 * 32 in saved()
    assert 4 * 32 not in saved("dropout-mask")


def test_optimizers_left_to_torch_are_foreach() -> None:
    def is_foreach(*without: str) -> bool:
        workload = workload_of(lambda: nn.Linear(8, 8), lambda: torch.ones(2, 8), optimizer=torch.optim.AdamW)
        return any("_foreach_" in name for name in recorded(workload, "a100-80gb", *without).names)

    assert is_foreach()
    assert not is_foreach("foreach-optimizer")


def test_autocast_to_cuda_is_not_silently_off() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch).float().sum()

    workload = workload_of(lambda: nn.Linear(64, 64), lambda: torch.ones(8, 64), loss=loss)
    trace = recorded(workload, "a100-80gb")
    weight_copy = 2 * 64 * 64
    assert trace.autocast == "bfloat16"
    assert any(s.nbytes == weight_copy for s in trace.steps[-1].storages)
    assert any("gradient scaling" in line for line in not_modelled(trace, hardware_named("a100-80gb")))


AUTOCAST: dict[str, Callable[[Tensor], Tensor]] = {
    "power": lambda x: x.pow(3.0),
    "softmax": lambda x: x.softmax(-1),
    "log-softmax": lambda x: F.log_softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, (64,)),
    "sum": lambda x: x.sum(-1),
    "cumulative sum": lambda x: x.cumsum(0),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64)),
}


@pytest.mark.parametrize("name", sorted(AUTOCAST))
def test_autocast_runs_in_float32_what_it_does_on_cuda(name: str) -> None:
    """GIVEN a product in bfloat16 WHEN one of CUDA's operators follows THEN its result is float32."""

    def dtypes(*without: str) -> set[torch.dtype]:
        seen = []

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                result = AUTOCAST[name](model(batch))
            seen.append(result.dtype)
            return result.float().sum()

        workload = workload_of(lambda: nn.Linear(64, 64), lambda: torch.ones(8, 64), loss=loss)
        recorded(workload, "a100-80gb", *without)
        return set(seen)

    assert dtypes() == {torch.float32}
    if name != "cross entropy":  # which is in float32 on a CPU as well
        assert dtypes("autocast-lists") == {torch.bfloat16}


@pytest.mark.parametrize(("dtype", "num_large"), [(torch.float16, 1), (torch.bfloat16, 2)])
def test_softmax_is_fused_with_its_cast_from_float16(dtype: torch.dtype, num_large: int) -> None:
    """WHEN softmax makes float32 of half precision THEN only bfloat16 has a float32 copy of the input."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=dtype):
            return F.log_softmax(model(batch), -1)[0, 0]

    workload = workload_of(lambda: nn.Linear(64, 48), lambda: torch.ones(8, 64), loss=loss)
    step = recorded(workload, "a100-80gb").steps[-1]
    large = [s for s in step.storages if s.nbytes == 4 * 8 * 48 and s.phase in ("forward", "loss") and s.birth >= 0]
    assert len(large) == num_large


def test_autocast_on_a_cpu_is_itself_again_afterwards() -> None:
    with recording_for(hardware_named("l4")).choices():
        pass
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ones(3, dtype=torch.bfloat16).softmax(-1).dtype == torch.bfloat16


# -- rules on the records ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "nbytes"),
    [
        ("h100-80gb", 32 * MIB),
        ("b200", 32 * MIB),
        ("rtx-5090", 32 * MIB),
        ("a100-80gb", 8_519_680),
        ("t4", 8_519_680),
        ("mi300x", 128 * MIB),
    ],
)
def test_cublas_holds_a_workspace_per_thread(device: str, nbytes: int) -> None:
    """One from forward's first product on, one from backward's; they are still there in later steps."""
    workload = workload_of(lambda: nn.Linear(8, 8), lambda: torch.ones(2, 8))
    trace = recorded(workload, device)
    first, steady = trace.steps
    births = [s.birth for s in first.storages if s.nbytes == nbytes]
    assert births == [
        numbers_of(trace, first, "addmm")[0],
        next(n for n in numbers_of(trace, first, "mm") if first.ops[n].phase == "backward"),
    ]
    assert [(s.birth, s.death) for s in steady.storages if s.nbytes == nbytes] == [(-1, len(steady.ops))] * 2
    without = recorded(workload, device, "cublas-workspace")
    assert not [s for step in without.steps for s in step.storages if s.nbytes == nbytes]


def test_step_counters_stay_on_the_host_unless_fused() -> None:
    def devices(*without: str, **options: Any) -> set[str]:
        workload = workload_of(
            lambda: nn.Linear(8, 8),
            lambda: torch.ones(2, 8),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, **options),
        )
        step = recorded(workload, "a100-80gb", *without).steps[-1]
        return {s.device for s in step.storages if s.category == "optimizer_state" and s.nbytes <= 8}

    assert devices() == {"cpu"}
    assert devices(fused=True) == {"cuda"}
    assert devices("host-counters") == {"cuda"}


def test_tensors_are_on_the_device() -> None:
    workload = workload_of(lambda: nn.Linear(8, 8), lambda: torch.ones(2, 8))
    trace = recorded(workload, "a100-80gb")
    assert trace.device == "cuda"
    assert {s.device for step in trace.steps for s in step.storages} == {"cuda"}
    assert recorded(workload, "a100-80gb", "device-names").device == "cpu"


def test_a_live_trace_gets_the_rules_on_records_and_says_what_it_lacks() -> None:
    workload = workload_of(lambda: nn.Linear(64, 64), lambda: torch.ones(16, 64))
    hardware = hardware_named("a100-80gb")
    live = record(workload)
    trace = translated(live, hardware)
    assert trace.device == "cuda"
    assert trace.base_bytes == hardware.context_bytes[0]
    (number,) = numbers_of(trace, trace.steps[0], "addmm")
    product_bytes = 4 * (16 * 64 + 64 * 64 + 64 + 16 * 64)
    assert trace.steps[0].ops[number].seconds == product_bytes / hardware.memory_bytes_per_second
    assert any("machine that recorded the trace" in line for line in not_modelled(trace, hardware))
    assert translated(trace, hardware).steps == trace.steps


# -- the process on the device -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A model whose tensors are larger than the smallest blocks."""
    workload = workload_of(
        lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))),
        lambda: torch.ones(1024, 512),
        optimizer=torch.optim.AdamW,
    )
    return recorded(workload, "a100-80gb")


def test_the_first_step_is_the_steady_one_in_which_state_appears(trace: Trace) -> None:
    first, steady = as_first(trace.steps[-1]), trace.steps[-1]
    start = next(number for number, op in enumerate(steady.ops) if op.phase == "optimizer")
    appearing = [s for s in first.storages if s.category == "optimizer_state" and s.device == "cuda"]
    assert {s.birth for s in appearing} == {start}
    assert sum(s.nbytes for s in appearing) == 2 * sum(s.nbytes for s in steady.storages if s.category == "parameter")


def test_reserved_is_what_the_allocator_holds(trace: Trace) -> None:
    """Segments of at least 2 MiB, never fewer bytes than are alive; the first step needs no more than the next."""
    profile, _ = profile_for("2.13.0")
    peaks = step_peaks(trace.steps, profile)
    assert peaks is not None
    assert len(peaks) == 3
    assert all(peak.reserved_bytes % (2 * MIB) == 0 for peak in peaks)
    assert all(peak.reserved_bytes >= peak.live_bytes for peak in peaks)
    assert [peak.live_bytes for peak in peaks] == [live_peak_bytes(trace.steps[n], "cuda") for n in (0, 1, 1)]
    assert all(before.reserved_bytes <= after.reserved_bytes for before, after in itertools.pairwise(peaks))


def test_a_device_that_is_too_small_runs_out_of_memory(trace: Trace) -> None:
    profile, _ = profile_for("2.13.0")
    needed = max(peak.live_bytes for peak in step_peaks(trace.steps, profile) or ())
    assert step_peaks(trace.steps, profile, capacity_bytes=needed // 2) is None


def test_the_process_is_context_plus_reserved_with_a_margin_that_says_where_it_comes_from(trace: Trace) -> None:
    hardware = hardware_named("a100-80gb")
    model = DeviceModel(trace, hardware, "2.13.0")
    resident = model.untreated(trace.steps[-1])
    peaks = step_peaks((as_first(trace.steps[-1]), trace.steps[-1]), model.profile)
    reserved = max(peak.reserved_bytes for peak in peaks or ())
    low, high = hardware.context_bytes
    assert resident.process_bytes == low + reserved
    assert margin_bytes(hardware, reserved) == high - low + int(MARGIN_SHARE * reserved)
    budget = model.budget_for(resident.process_bytes)
    assert resident.process_bytes + model.margin_bytes(budget) <= budget
    assert resident.process_bytes + model.margin_bytes(budget - 4) > budget - 4


# -- seconds -----------------------------------------------------------------------------------------------------------


def work(**changes: Any) -> OpWork:
    return OpWork(
        **{"name": "aten.mm.default", "dtype": "bfloat16", "flops": 0, "read_bytes": 0, "written_bytes": 0, **changes}
    )


def test_an_operation_takes_as_long_as_its_arithmetic_or_its_bytes() -> None:
    hardware: Hardware = hardware_named("h100-80gb")
    seconds = Roofline(hardware)
    assert seconds(work(flops=hardware.flops["bfloat16"])) == 1.0
    assert seconds(work(flops=hardware.flops["float32"], dtype="float32")) == 1.0
    assert seconds(work(flops=hardware.flops["float32"], dtype="float64")) == 1.0
    assert Roofline(hardware, allows_tf32=True)(work(flops=hardware.flops["tf32"], dtype="float32")) == 1.0
    bandwidth = int(hardware.memory_bytes_per_second)
    assert seconds(work(flops=1000, read_bytes=bandwidth, written_bytes=bandwidth)) == 2.0
    assert seconds(work()) == 0.0
