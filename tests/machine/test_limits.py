"""The memory limit in force, read from recorded control group trees: v1, v2, hybrid, and inside containers."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memwall.errors import UsageError
from memwall.machine.limits import (
    CgroupLimit,
    budget_bytes,
    cgroup_limit,
    device_total_bytes,
    free_memory_bytes,
    memory_limit_bytes,
    own_device,
    pinnable_bytes,
)

GIB = 1 << 30
V1_NO_LIMIT = "9223372036854771712"
MEMINFO = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree:         9000000 kB\n"}

V2_MOUNT = {
    "proc/self/mountinfo": (
        "22 28 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n"
        "34 22 0:29 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    )
}
V1_MOUNT = {
    "proc/self/mountinfo": (
        "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    )
}
HYBRID_MOUNT = {
    "proc/self/mountinfo": (
        V1_MOUNT["proc/self/mountinfo"] + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
    )
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in MEMINFO.items():
        write(tmp_path, {name: text})
    return tmp_path


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_v2_limit_of_an_ancestor_counts(tree: Path) -> None:
    write(tree, V2_MOUNT)
    write(
        tree,
        {
            "proc/self/cgroup": "0::/user.slice/session.scope\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/user.slice/session.scope/memory.max": f"{6 * GIB}\n",
        },
    )
    assert cgroup_limit(root=tree) == CgroupLimit(
        limit_bytes=4 * GIB, path="/sys/fs/cgroup/user.slice/memory.max", version=2
    )
    assert memory_limit_bytes(root=tree) == 4 * GIB
    assert device_total_bytes("cpu", root=tree) == 4 * GIB


def test_v2_max_is_no_limit(tree: Path) -> None:
    write(tree, V2_MOUNT)
    write(tree, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"})
    assert cgroup_limit(root=tree) is None
    assert memory_limit_bytes(root=tree) == 16 * GIB


def test_v2_limit_above_physical_memory_does_not_add_any(tree: Path) -> None:
    write(tree, V2_MOUNT)
    write(tree, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": f"{64 * GIB}\n"})
    assert memory_limit_bytes(root=tree) == 16 * GIB


def test_v2_inside_a_cgroup_namespace(tree: Path) -> None:
    """The group reads as / or as /.. there, and the mount shows the container's own files."""
    write(tree, V2_MOUNT)
    write(tree, {"sys/fs/cgroup/memory.max": f"{2 * GIB}\n"})
    for group in ("0::/\n", "0::/../../other\n"):
        write(tree, {"proc/self/cgroup": group})
        assert memory_limit_bytes(root=tree) == 2 * GIB


def test_v1_sentinel_is_no_limit(tree: Path) -> None:
    write(tree, V1_MOUNT)
    write(
        tree,
        {
            "proc/self/cgroup": "4:memory:/jobs/7\n1:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n",
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n",
            "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n",
            "sys/fs/cgroup/memory/jobs/7/memory.stat": f"cache 0\nhierarchical_memory_limit {V1_NO_LIMIT}\n",
        },
    )
    assert cgroup_limit(root=tree) is None


def test_v1_nested_limits_take_the_tightest(tree: Path) -> None:
    write(tree, V1_MOUNT)
    write(
        tree,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/jobs/7\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n",
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": f"{5 * GIB}\n",
        },
    )
    assert cgroup_limit(root=tree) == CgroupLimit(
        limit_bytes=3 * GIB, path="/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", version=1
    )


def test_v1_container_sees_the_limit_of_hidden_ancestors(tree: Path) -> None:
    """The mount starts at the container's group; only memory.stat knows what holds above it."""
    write(
        tree,
        {
            "proc/self/mountinfo": "35 31 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            "proc/self/cgroup": "4:memory:/docker/ab/child\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/child/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n",
            "sys/fs/cgroup/memory/child/memory.stat": f"total_rss 5\nhierarchical_memory_limit {2 * GIB}\n",
        },
    )
    assert memory_limit_bytes(root=tree) == 2 * GIB


def test_hybrid_reads_the_hierarchy_with_the_memory_controller(tree: Path) -> None:
    """A bare 0::/ beside a v1 memory line: the v2 tree's files say nothing about memory."""
    write(tree, HYBRID_MOUNT)
    write(
        tree,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/jobs/7\n1:cpu:/\n0::/\n",
            "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/unified/memory.max": f"{GIB}\n",
        },
    )
    found = cgroup_limit(root=tree)
    assert found is not None
    assert (found.version, found.limit_bytes) == (1, 3 * GIB)


def test_escaped_mount_point(tree: Path) -> None:
    write(
        tree,
        {
            "proc/self/mountinfo": "34 22 0:29 / /my\\040groups rw - cgroup2 cgroup2 rw\n",
            "proc/self/cgroup": "0::/a\n",
            "my groups/a/memory.max": f"{GIB}\n",
        },
    )
    assert memory_limit_bytes(root=tree) == GIB


def test_system_without_control_groups(tree: Path) -> None:
    assert cgroup_limit(root=tree) is None
    assert memory_limit_bytes(root=tree) == 16 * GIB


def test_this_machine_has_at_least_what_the_process_holds() -> None:
    assert memory_limit_bytes() > 64 << 20


def test_meminfo_without_a_total_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        memory_limit_bytes(root=tmp_path)
    assert str(raised.value) == (
        f"{tmp_path}/proc/meminfo does not say how much memory there is; expected a MemTotal line"
    )


def test_unknown_device_is_an_error() -> None:
    with pytest.raises(UsageError) as raised:
        device_total_bytes("tpu")
    assert str(raised.value) == "'tpu' is no device of this machine; expected cpu, cuda or cuda:N"


def test_missing_cuda_device_says_how_many_there_are() -> None:
    import torch

    count = torch.cuda.device_count()
    with pytest.raises(UsageError) as raised:
        device_total_bytes(f"cuda:{count}")
    assert str(raised.value) == (
        f"'cuda:{count}': this machine has {count} CUDA devices; expected cpu, or cuda:N below that"
    )


# -- what is free ------------------------------------------------------------------------------------------------------


def test_what_is_free_is_the_cgroup_s_limit_without_what_it_uses(tree: Path) -> None:
    """GIVEN 4 GiB of which 3 are used, half a one by files that nobody reads THEN 1.5 GiB can be had."""
    write(tree, V2_MOUNT)
    group = "sys/fs/cgroup/job"
    write(
        tree,
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
            f"{group}/memory.max": f"{4 * GIB}\n",
            f"{group}/memory.current": f"{3 * GIB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
        },
    )
    assert free_memory_bytes(root=tree) == 3 * GIB // 2
    write(tree, {f"{group}/memory.current": f"{5 * GIB}\n"})
    assert free_memory_bytes(root=tree) == 0


def test_what_is_free_under_v1(tree: Path) -> None:
    write(tree, V1_MOUNT)
    group = "sys/fs/cgroup/memory/job"
    write(
        tree,
        {
            "proc/self/cgroup": "4:memory:/job\n",
            f"{group}/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{group}/memory.usage_in_bytes": f"{GIB}\n",
            f"{group}/memory.stat": f"hierarchical_memory_limit {2 * GIB}\ntotal_inactive_file {GIB // 4}\n",
        },
    )
    assert free_memory_bytes(root=tree) == 5 * GIB // 4


def test_what_is_free_without_a_cgroup_is_what_the_machine_has(tree: Path) -> None:
    write(tree, {"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"})
    assert free_memory_bytes(root=tree) == 8 * GIB


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA devices of 40 and 80 GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=(40 * GIB, 80 * GIB)[index])
    )
    monkeypatch.setattr("memwall.machine.device_sharers.others_bytes", lambda device: None)


@pytest.mark.usefixtures("two_devices")
def test_a_budget_in_percent_is_of_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert budget_bytes("50%", "cuda") == budget_bytes("50%", "cuda:0") == 20 * GIB
    assert budget_bytes("50%", "cuda:1") == 40 * GIB
    assert budget_bytes("3GiB", "cuda:1") == budget_bytes(3 * GIB, "cpu") == 3 * GIB


@pytest.mark.parametrize(("ranks", "share"), [("", 1), ("4", 4)])
def test_ranks_of_one_host_have_equal_parts_of_its_memory(
    ranks: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("memwall.machine.limits.memory_limit_bytes", lambda *, root=None: 16 * GIB)
    assert budget_bytes("50%", "cpu") == 8 * GIB // share
    assert budget_bytes("2GiB", "cpu") == 2 * GIB


def test_a_size_asks_no_device() -> None:
    assert budget_bytes("2GiB", "meta") == 2 * GIB
    with pytest.raises(UsageError, match="'meta' is no device of this machine"):
        budget_bytes("50%", "meta")


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(("rank", "device"), [("", "cuda:0"), ("0", "cuda:0"), ("1", "cuda:1"), ("2", "cuda:0")])
def test_a_rank_trains_on_its_own_device(rank: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert own_device() == device


def test_without_cuda_a_rank_trains_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device() == "cpu"


@pytest.mark.parametrize(("ranks", "share"), [(None, 1), ("", 1), ("4", 4), ("0", 1), ("many", 1)])
def test_processes_of_one_host_share_what_may_be_pinned(
    ranks: str | None, share: int, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree, {"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert pinnable_bytes(root=tree) == 8 * GIB * 6 // 10 // share
    assert pinnable_bytes(is_asked_for=True, root=tree) == 8 * GIB * 9 // 10 // share
