"""`make gpu-kernels` where there is no GPU: it says so, measures nothing and writes nothing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_refuses_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_kernels.py", "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "needs a CUDA device" in done.stderr
    assert "nothing was measured, nothing written" in done.stderr
    assert not output.exists()
