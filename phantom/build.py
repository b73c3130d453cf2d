"""Builds the stub libraries of the phantom device against the CUDA build of torch that this Python has.

    .venv/phantom/bin/python phantom/build.py FOLDER

Each library is a part written by hand and a generated one: every other symbol that the real library exports (or, of the
driver, that its header declares) becomes a function that says success and is counted. NVIDIA's public headers are
included from its packages; nothing of its libraries is copied or run.
"""

import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
HARDWARE = HERE.parent / "memwall" / "data" / "hardware.toml"
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-w")
DEVICE = "libphantom.so"


class Library(NamedTuple):
    """Names what a stub is made of."""

    sources: tuple[str, ...]
    """Files of src/ that are written by hand."""
    exports: tuple[str, str] | None
    """The package and its file (a library, or a header that declares them) whose functions the stub has as well."""
    flags: tuple[str, ...] = ()
    is_versioned: bool = True
    """Whether the symbols of the real library carry its name as their version."""
    calls_runtime: bool = False
    refusing: tuple[str, int] = ("", 0)
    """Which generated functions fail (a pattern of names), with which status: they would return a size or a pointer."""
    launching: str = ""
    """Which generated functions are kernels, as a pattern of names; their first argument is a handle."""


CUDNN = "nvidia/cudnn/lib/libcudnn.so.9"
RUNTIME = "libcudart.so.13"
RUNTIME_SOURCES = ("cudart_device.cpp", "cudart_memory.cpp", "cudart_streams.cpp", "cudart_kernels.cpp")
LIBRARIES = {
    RUNTIME: Library(RUNTIME_SOURCES, ("nvidia-cuda-runtime", "nvidia/cu13/lib/libcudart.so.13")),
    "libcuda.so.1": Library(("cuda.cpp",), ("nvidia-cuda-runtime", "nvidia/cu13/include/cuda.h"), is_versioned=False),
    "libnvidia-ml.so.1": Library(("nvml.cpp",), None, is_versioned=False),
    "libcublas.so.13": Library(
        ("cublas.cpp",),
        ("nvidia-cublas", "nvidia/cu13/lib/libcublas.so.13"),
        calls_runtime=True,
        launching=r"(?i)gemm|gemv|ger|trsm|trmm|syrk|symm|dot|axpy|scal|nrm2|geam|dgmm|geqrf|getr|matinv|gels",
    ),
    "libcublasLt.so.13": Library(
        ("cublas.cpp",), ("nvidia-cublas", "nvidia/cu13/lib/libcublasLt.so.13"), ("-DPHANTOM_LT",), calls_runtime=True
    ),
    "libcudnn.so.9": Library(
        ("cudnn.cpp", "cudnn_rnn.cpp"),
        ("nvidia-cudnn-cu13", CUDNN),
        refusing=("Size|RNNWeightParams", 3000),
    ),
    "libnccl.so.2": Library(
        ("nccl.cpp", "nccl_comm.cpp"),
        ("nvidia-nccl-cu13", "nvidia/nccl/lib/libnccl.so.2"),
        is_versioned=False,
        refusing=("^pnccl|MemStats|Grow|Shrink|UniqueId|Window|DevComm|Pointer|Signal|Gather|Scatter", 5),
    ),
    "libcusparse.so.12": Library(
        (), ("nvidia-cusparse", "nvidia/cu13/lib/libcusparse.so.12"), refusing=("[bB]ufferSize", 10)
    ),
    "libcusparseLt.so.0": Library((), ("nvidia-cusparselt-cu13", "nvidia/cusparselt/lib/libcusparseLt.so.0")),
    "libcusolver.so.12": Library(
        (), ("nvidia-cusolver", "nvidia/cu13/lib/libcusolver.so.12"), refusing=("[bB]ufferSize", 9)
    ),
    "libcufft.so.12": Library(
        (),
        ("nvidia-cufft", "nvidia/cu13/lib/libcufft.so.12"),
        refusing=("MakePlan|Estimate|GetSize|Plan[123]d|PlanMany", 16),
    ),
}
INCLUDES = (
    ("nvidia-cuda-runtime", "nvidia/cu13/include"),
    ("nvidia-cuda-crt", "nvidia/cu13/include"),
    ("nvidia-cudnn-cu13", "nvidia/cudnn/include"),
)


def located(package: str, name: str) -> Path:
    """Returns the path of a file of an installed package."""
    return Path(str(distribution(package).locate_file(name)))


def run(*command: object) -> str:
    """Returns what a command printed; ends the build with its complaint where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"phantom: {' '.join(map(str, command))}\n{done.stderr[-4000:]}")
    return done.stdout


def exported(source: Path) -> set[str]:
    """Returns the functions that a library exports, or that a header of the driver declares."""
    if source.suffix == ".h":
        return set(re.findall(r"^\w+ CUDAAPI\s+(cu\w+)\(", source.read_text(), re.M))
    lines = run("nm", "-D", "--defined-only", source).splitlines()
    return {line.split()[2].split("@")[0] for line in lines if line.split()[1] in "TWi"} - {"_init", "_fini"}


def defined(binary: Path) -> set[str]:
    """Returns the functions that a compiled file has."""
    return {line.split()[2] for line in run("nm", "--defined-only", binary).splitlines() if line.split()[1] in "TW"}


def architectures() -> list[int]:
    """Returns what torch's kernels were compiled for: 75, 80, ... A kernel runs as the largest that a card can run."""
    asked = "import torch; print(torch._C._cuda_getArchFlags())"
    return sorted(int(each) for each in re.findall(r"sm_(\d+)", run(sys.executable, "-c", asked)))


def cards() -> str:
    """Returns NVIDIA's devices of hardware.toml as a table in C++."""
    known = architectures()
    file = tomllib.loads(HARDWARE.read_text(encoding="utf-8"))
    rows = []
    for key, device in file["devices"].items():
        capability = file["capabilities"].get(device["compute_capability"])
        if capability is None:
            continue  # not NVIDIA's
        major, minor = device["compute_capability"].split(".")
        binary = max((each for each in known if each <= 10 * int(major) + int(minor)), default=known[0])
        peer = device.get("peer_link_bytes_per_second", device["host_link_bytes_per_second"])
        rows.append(
            f'{{"{key}", "{device["product"]}", {device["usable_bytes"]}ULL, {major}, {minor}, '
            f"{binary}, {device['num_multiprocessors']}, {device['l2_cache_bytes']}, "
            f"{capability['max_threads_per_multiprocessor']}, {capability['max_blocks_per_multiprocessor']}, "
            f"{capability['shared_bytes_per_multiprocessor']}, {capability['max_shared_bytes_per_block']}, "
            f"{device['host_link_bytes_per_second']}, {peer}, {device['memory_bytes_per_second']}}},"
        )
    head = ['#include "device.h"', "namespace phantom {", "constexpr Card kCards[] = {"]
    return "\n".join([*head, *rows, "};", "}  // namespace phantom", ""])


def compiled(source: str, flags: tuple[str, ...], work: Path) -> Path:
    """Returns the object file of a source."""
    made = work / f"{source}{''.join(flags)}.o"
    includes = [f"-I{path}" for path in (work, HERE / "src", *(located(*each) for each in INCLUDES))]
    own = f'-DPHANTOM_REAL_CUDNN="{located("nvidia-cudnn-cu13", CUDNN)}"'
    run("g++", *FLAGS, own, *flags, *includes, "-c", HERE / "src" / source, "-o", made)
    return made


STUBS = (
    "void called_stub(const char*);",
    "long refused(const char*, long);",
    "long launched_blas(void*, const char*);",
)


def _body(symbol: str, parts: Library) -> str:
    """Returns the parameters and the body of a generated function."""
    pattern, status = parts.refusing
    if status and re.search(pattern, symbol):
        return f'() {{ return phantom::refused("{symbol}", {status}); }}'
    if parts.launching and re.search(parts.launching, symbol):
        return f'(void* handle) {{ return phantom::launched_blas(handle, "{symbol}"); }}'
    return f'() {{ phantom::called_stub("{symbol}"); return 0; }}'


def library(name: str, parts: Library, objects: list[Path], folder: Path, work: Path) -> str:
    """Links a stub, and returns what it consists of."""
    own = set().union(*(defined(each) for each in objects))
    stubs = sorted(each for each in (exported(located(*parts.exports)) if parts.exports else set()) - own)
    stubs = [symbol for symbol in stubs if symbol.isidentifier()]
    generated = work / f"{name}.stubs.cpp"
    lines = [f"namespace phantom {{ {each} }}" for each in STUBS] + ['extern "C" {']
    lines += [f"long {symbol}{_body(symbol, parts)}" for symbol in stubs]
    generated.write_text("\n".join([*lines, "}", ""]))
    links: list[object] = [folder / DEVICE, *([folder / RUNTIME] if parts.calls_runtime else []), "-ldl"]
    version = ["-Wl,--default-symver"] if parts.is_versioned else []
    run(
        *("g++", *FLAGS, "-shared", *objects, generated, "-o", folder / name, f"-Wl,-soname,{name}"),
        *("-Wl,-rpath,$ORIGIN", *version, *links),
    )
    return f"{name}: {len(own)} functions, {len(stubs)} generated"


def main(folder: Path) -> None:
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    (work / "cards.h").write_text(cards())
    own = ["settings.cpp", "schedule.cpp", "streams.cpp", "memory.cpp"]
    wanted = [(source, ()) for source in own]
    wanted += [(source, parts.flags) for parts in LIBRARIES.values() for source in parts.sources]
    with ThreadPoolExecutor(2) as pool:
        objects = dict(zip(wanted, pool.map(lambda each: compiled(*each, work), wanted), strict=True))
        device = [objects[source, ()] for source in own]
        run("g++", *FLAGS, "-shared", *device, "-o", folder / DEVICE, f"-Wl,-soname,{DEVICE}", "-ldl")
        for name, parts in LIBRARIES.items():
            print(library(name, parts, [objects[source, parts.flags] for source in parts.sources], folder, work))
    (folder / "libraries.txt").write_text("".join(f"{name}\n" for name in LIBRARIES))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
