"""Run by test_interpreter.py, with TRITON_INTERPRET=1: elements beyond the 2^31st, in a sparse file of 6 GiB.

Each kernel reaches them; its copy with 32-bit program ids dies of a bad address. One child imports torch once and forks
for every case, since a death is what is looked for.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import memwall.triton_kernels as package

# Kernel module and what it is called with: `rows` are four rows of 128 fp16 elements, 2^30 apart.
CASES: dict[str, tuple[str, str]] = {
    "pack": (
        "pack/_kernel",
        """
codes, units = torch.empty(512, dtype=torch.int8), torch.empty(4)
module.launch_pack(rows, codes, units, "int8")
found, expected = codes.view(4, 128) * units[:, None], rows.float()
""",
    ),
}
CHILD = """
import importlib.util, json, os, sys
import numpy as np, torch
import memwall.triton_kernels._store, memwall.triton_kernels.pack  # before the forks: it takes seconds
folder, cases = sys.argv[1], json.loads(sys.argv[2])
def load(path, name):
    spec = importlib.util.spec_from_file_location("memwall.triton_kernels.pack." + name, path)
    module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module; spec.loader.exec_module(module)
    return module
def run(path, code):
    memory = np.memmap(folder + "/rows", dtype=np.float16, mode="w+", shape=(3 * (1 << 30) + 4096,))
    rows = torch.from_numpy(memory).as_strided((4, 128), (1 << 30, 1))
    rows.copy_(torch.arange(512.0).reshape(4, 128) % 7 - 3)
    names = {"module": load(path, "_far"), "rows": rows, "torch": torch}
    exec(code, names)
    assert torch.allclose(names["found"], names["expected"], rtol=1e-3, atol=2e-2)
statuses = {}
for name, (path, code) in cases.items():
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(path, code)
            status = 0
        finally:
            os._exit(status)
    statuses[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(statuses))
"""


@pytest.fixture(scope="module")
def statuses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder, given = tmp_path_factory.mktemp("far"), {}
    for name, (module, code) in CASES.items():
        source = Path(package.__file__).parent / f"{module}.py"
        text = source.read_text()
        assert ".to(tl.int64)" in text
        narrow = folder / f"{name}.py"
        narrow.write_text(text.replace("tl.program_id(0).to(tl.int64)", "tl.program_id(0)"))
        given |= {f"{name}-int64": (str(source), code), f"{name}-int32": (str(narrow), code)}
    command = [sys.executable, "-c", CHILD, str(folder), json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout), errors=done.stderr)


@pytest.mark.parametrize("name", CASES)
def test_elements_beyond_two_to_the_31(statuses: dict[str, int], name: str) -> None:
    assert statuses[f"{name}-int64"] == 0, statuses["errors"]
    assert statuses[f"{name}-int32"] == -11
