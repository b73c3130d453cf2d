"""Check what a wheel installs: memwall with its data, the kernels below it, and no other top-level name."""

import re
import sys
import zipfile
from pathlib import Path

REQUIRED = (
    "memwall/__init__.py",
    "memwall/cli/app.py",
    "memwall/demo/train.py",
    "memwall/py.typed",
    "memwall/triton_kernels/__init__.py",
)

LIBRARIES = (
    *(f"memwall/native/{name}" for name in ("tensor_heap", "crc32")),
    *(f"memwall/rows/native/{name}" for name in ("pages", "rows")),
)


def faults_of(names: list[str], data_files: list[str]) -> list[str]:
    """What is wrong with a wheel of these members; `data_files` are the package's files that are not code."""
    faults = [f"{name} is missing" for name in (*REQUIRED, *data_files) if name not in names]
    for library in LIBRARIES if sys.platform == "linux" else ():
        if not any(re.fullmatch(rf"{library}\..*\.so", name) for name in names):
            faults.append(f"{library} is not built: is there a C compiler?")
    tops = {name.partition("/")[0] for name in names}
    for top in sorted(tops):
        if top != "memwall" and re.fullmatch(r"torch_memwall-[\w.]+\.dist-info", top) is None:
            faults.append(f"top-level {top} would be installed")
    faults += [f"{name} is no part of the package" for name in names if "__pycache__" in name or "/tests/" in name]
    return faults


def main() -> int:
    (wheel,) = sys.argv[1:]
    root = Path(__file__).resolve().parent.parent
    data = [*root.glob("memwall/data/*.toml"), *root.glob("memwall/report/templates/*.html.j2")]
    names = zipfile.ZipFile(wheel).namelist()
    faults = faults_of(names, [path.relative_to(root).as_posix() for path in data])
    for fault in faults:
        print(f"{wheel}: {fault}", file=sys.stderr)
    print(f"{wheel}: {len(names)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
