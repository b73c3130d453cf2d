"""The devices memwall knows without having them: complete, sourced, dense, and found by name."""

import re

import pytest

from memwall.errors import UsageError
from memwall.machine.hardware import Hardware, hardware_named, hardware_of_device

NAMES = (
    "h100-80gb",
    "h100-pcie-80gb",
    "h200",
    "b200",
    "a100-40gb",
    "a100-80gb",
    "l4",
    "l40s",
    "t4",
    "v100-16gb",
    "v100-32gb",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "mi300x",
)
# What the vendor prints with 2:4 sparsity, for half precision: 1e12 FLOP/s. Ampere and later have it, Volta and Turing
# not. GeForce: with fp32 accumulation. L40S: twice the 362.05 that its data sheet prints as dense, beside 733.
SPARSE_HALF = {
    "h100-80gb": 1979,
    "h100-pcie-80gb": 1513,
    "h200": 1979,
    "b200": 4500,
    "a100-40gb": 624,
    "a100-80gb": 624,
    "l4": 242,
    "l40s": 724.1,
    "rtx-3090": 142,
    "rtx-4090": 330.3,
    "rtx-5090": 419,
    "mi300x": 2614.9,
}
# What is printed on the box, in decimal GB.
BOX_GB = {
    "h100-80gb": 80,
    "h100-pcie-80gb": 80,
    "h200": 141,
    "b200": 180,
    "a100-40gb": 40,
    "a100-80gb": 80,
    "l4": 24,
    "l40s": 48,
    "t4": 16,
    "v100-16gb": 16,
    "v100-32gb": 32,
    "rtx-3090": 24,
    "rtx-4090": 24,
    "rtx-5090": 32,
    "mi300x": 192,
}


@pytest.fixture(params=NAMES)
def device(request: pytest.FixtureRequest) -> Hardware:
    return hardware_named(request.param)


def test_every_figure_has_a_source_that_says_where_it_was_read(device: Hardware) -> None:
    figures = {"usable_bytes", "memory_bytes_per_second", "compute_capability", "host_link_bytes_per_second"}
    figures |= {"num_multiprocessors", "l2_cache_bytes", "context_bytes", "communicator_bytes", "flops"}
    if device.peer_link_bytes_per_second is not None:
        figures.add("peer_link_bytes_per_second")
    assert set(device.sources) == figures
    assert min(len(source) for source in device.sources.values()) > 30


def test_half_precision_is_dense(device: Hardware) -> None:
    sparse = SPARSE_HALF.get(device.name)
    if sparse is None:
        assert device.name in {"t4", "v100-16gb", "v100-32gb"}
        assert "bfloat16" not in device.flops
        return
    assert device.flops["float16"] == device.flops["bfloat16"] == pytest.approx(sparse * 1e12 / 2, rel=1e-3)


def test_narrower_numbers_are_faster(device: Hardware) -> None:
    order = [dtype for dtype in ("float32", "tf32", "float16", "float8") if dtype in device.flops]
    speeds = [device.flops[dtype] for dtype in order]
    assert speeds == sorted(speeds)
    if "float8" in device.flops:
        assert device.flops["float8"] == pytest.approx(2 * device.flops["float16"], rel=0.02)


def test_usable_bytes_are_what_a_process_sees_not_what_is_on_the_box(device: Hardware) -> None:
    gib_on_the_box = BOX_GB[device.name]
    assert 0.88 * gib_on_the_box < device.usable_bytes / (1 << 30) <= gib_on_the_box


def test_the_context_is_a_range_that_leaves_room_for_work(device: Hardware) -> None:
    least, most = device.context_bytes
    assert 100 << 20 <= least < most < device.usable_bytes // 8
    assert 0 < device.communicator_bytes[0] <= device.communicator_bytes[1]


def test_the_host_link_is_one_direction_of_sixteen_lanes(device: Hardware) -> None:
    assert device.host_link_bytes_per_second in [16e9 * 2**number for number in range(4)]  # PCIe 3 to 6
    peer = device.peer_link_bytes_per_second
    assert peer is None or device.host_link_bytes_per_second < peer < device.memory_bytes_per_second


def test_pairs_that_share_a_chip() -> None:
    assert hardware_named("h200").flops == hardware_named("h100-80gb").flops
    assert hardware_named("a100-40gb").flops == hardware_named("a100-80gb").flops
    assert hardware_named("h200").memory_bytes_per_second > hardware_named("h100-80gb").memory_bytes_per_second


def test_a_name_in_another_spelling() -> None:
    assert hardware_named(" RTX_4090 ") is hardware_named("rtx-4090")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("h100", "closest are h100-80gb, h100-pcie-80gb"),
        ("a100-80g", "closest are a100-80gb"),
        ("4090", "closest are rtx-4090"),
        ("rtx-4080", "closest are rtx-4090"),
    ],
)
def test_an_unknown_name_offers_the_closest(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as raised:
        hardware_named(name)
    assert str(raised.value).startswith(f"'{name}' is no device that memwall has figures for; {meant}")


def test_a_name_like_no_other_lists_all() -> None:
    with pytest.raises(UsageError, match=re.escape(f"known are {', '.join(NAMES)}")):
        hardware_named("abacus")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce GTX 970", None),
    ],
)
def test_a_device_is_found_by_the_name_that_cuda_gives_it(name: str, entry: str | None) -> None:
    if entry is None:
        with pytest.raises(UsageError, match="--device"):
            hardware_of_device(name)
    else:
        assert hardware_of_device(name).name == entry
