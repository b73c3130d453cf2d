"""The smallest cap on a CPU: real trials under the kernel's limit, and the published figures."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import smallest_cap
from cgroup import CapUnavailable, memory_cap, own_group
from prediction_zoo import zoo_sha256

MIB = 1 << 20
README = Path(smallest_cap.__file__).parent / "README.md"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What runs in the place of a training run."""
    try:
        with memory_cap(1 << 30):
            pass
    except CapUnavailable as reason:
        pytest.skip(f"no memory cap can be enforced here: {reason}")
    path = tmp_path / "run.py"
    monkeypatch.setattr(smallest_cap, "__file__", str(path))
    return path


@pytest.mark.cgroup
def test_the_cap_of_a_process_is_what_the_kernel_lets_it_finish_with(script: Path) -> None:
    """GIVEN a process that fills 80 MiB, without a limit 120 WHEN its cap is searched THEN it is that of the first."""
    limit = own_group()[0]
    script.write_text(
        "import pathlib, re\n"
        f"group = re.search(r'memwall-cap-\\w+', pathlib.Path('/proc/self/cgroup').read_text())[0]\n"
        f"folder = pathlib.Path({str(limit)!r}) / group\n"
        "names = [name for name in ('memory.max', 'memory.limit_in_bytes') if (folder / name).exists()]\n"
        "text = (folder / names[0]).read_text().strip()\n"
        "is_free = text == 'max' or int(text) > 1 << 50\n"
        f"held = bytearray(b'x' * ({60 * MIB} if is_free else {40 * MIB}))\n"
        "print([1.0, 0.5, 0.5])\n"
    )
    row = smallest_cap.case_row("gpt2", 3, time.monotonic() + 60)
    assert row["unlimited"]["group_peak_bytes"] > 120 * MIB
    assert row["is_resolved"]
    assert row["cap_bytes"] - row["too_small_bytes"] <= 0.01 * row["cap_bytes"]
    assert 80 * MIB < row["cap_bytes"] < 115 * MIB
    assert {trial["outcome"] for trial in row["trials"]} == {"finished", "out of memory"}


@pytest.mark.cgroup
def test_a_trial_that_hangs_is_ended_and_does_not_fit(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smallest_cap, "_LEAST_SECONDS", 0.5)
    before = {path.name for path in own_group()[0].iterdir()}
    script.write_text("import time\ntime.sleep(600)\n")
    assert smallest_cap.run_under("gpt2", 3, 256 * MIB, 0.5) == ("hung", None, 0.0)
    script.write_text("raise SystemExit(7)\n")
    assert smallest_cap.run_under("gpt2", 3, 256 * MIB, 30)[0] == "failed"
    with pytest.raises(RuntimeError, match="gpt2 without a limit: failed"):
        smallest_cap.case_row("gpt2", 3, 0.0)
    assert {path.name for path in own_group()[0].iterdir()} == before


def test_an_unknown_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        smallest_cap.main(["gpt9"])
    assert "no family gpt9; there are resnet, mobilenet" in capsys.readouterr().err


def test_the_published_caps_are_of_this_zoo_resolved_and_shown() -> None:
    published: dict[str, Any] = json.loads(smallest_cap.RESULT.read_text())
    assert published["zoo_sha256"] == zoo_sha256()
    assert published["tag"] == "cpu-measured"
    for row in published["rows"]:
        assert row["is_resolved"]
        assert row["too_small_bytes"] < row["cap_bytes"] <= 1.1 * row["unlimited"]["group_peak_bytes"]
        assert row["cap_bytes"] - row["too_small_bytes"] <= min(32 * MIB, 0.01 * row["cap_bytes"])
    assert smallest_cap.table(published) in README.read_text()
