"""Makes the environment of the phantom device: a CUDA build of torch on top of .venv, and the built stubs.

    .venv/bin/python phantom/environment.py FOLDER [--torch torch==2.13.0] [--base ENVIRONMENT]

Where this Python has the CUDA build itself, as on a machine with a GPU, only two headers are downloaded. `--base` names
an environment that has the build and nvidia-cuda-crt already, so that nothing is downloaded. Exit status 77: the CUDA
build cannot be had here.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
CANNOT = 77
# Two headers that cuda_runtime_api.h includes; the packages that torch requires leave them out.
CRT = "nvidia-cuda-crt==13.0.*"
# From 1.16 on highspy looks for CUDA libraries itself, and crashes in the stubs; this release does not.
SOLVER = "highspy==1.15.1"
SCRIPTS = ("memwall", "pytest", "torchrun", "accelerate")
CUDA_OF_TORCH = "import torch; print(torch.version.cuda)"
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"


def purelib_of(environment: Path) -> str:
    """Returns the folder of an environment's packages."""
    return subprocess.check_output([environment / "bin" / "python", "-c", PURELIB], text=True).strip()


def refuse(why: str) -> None:
    print(f"phantom: skipped, {why}", file=sys.stderr)
    sys.exit(CANNOT)


def install(folder: Path, torch: str) -> None:
    """Installs the CUDA build of torch from the package index, about 5 GB."""
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    # A build for the CPU alone, 2.13.0+cpu, is ==2.13.0 as well where pip knows of one; it is not ===2.13.0.
    exact = torch.replace("===", "==").replace("==", "===")
    done = subprocess.run([*pip, exact, CRT], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        refuse(f"the CUDA build of {torch} cannot be had: {done.stderr.strip().splitlines()[-1]}")
    if subprocess.check_output([python, "-c", CUDA_OF_TORCH], text=True).strip() == "None":
        refuse(f"pip installed a build of {torch} without CUDA; `pip index versions torch` lists what there is")


def has_build(torch: str) -> bool:
    """Returns whether this Python, on whose packages the environment stands, has the CUDA build of torch itself."""
    try:
        is_asked_for = version("torch").partition("+")[0] == torch.rpartition("=")[2]
    except PackageNotFoundError:
        return False
    return is_asked_for and subprocess.check_output([sys.executable, "-c", CUDA_OF_TORCH], text=True).strip() != "None"


def install_headers(folder: Path) -> None:
    """Installs what the packages that torch requires leave out."""
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, CRT], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        refuse(f"{CRT} cannot be had: {done.stderr.strip().splitlines()[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="torch==2.13.0")
    parser.add_argument("--base", type=Path)
    options = parser.parse_args()
    if sys.platform != "linux" or platform.machine() != "x86_64":
        refuse(f"torch has no CUDA build with stubs for {sys.platform} on {platform.machine()}")
    missing = [tool for tool in ("g++", "nm") if shutil.which(tool) is None]
    if missing:
        refuse(f"{' and '.join(missing)} not found; Debian's package g++ has them")
    folder = options.folder.absolute()
    venv.create(folder, with_pip=False, symlinks=True)
    purelib = Path(purelib_of(folder))
    below = [sysconfig.get_path("purelib")]
    if options.base:
        below.insert(0, purelib_of(options.base))
    elif has_build(options.torch):
        install_headers(folder)
    else:
        install(folder, options.torch)
    if version("highspy") != SOLVER.partition("==")[2]:
        pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", purelib, "--upgrade", SOLVER], check=True)
    # The checkout comes first: a base that is a phantom environment itself has another checkout's packages.
    lines = [
        f"import sys; sys.path.append({str(HERE.parent)!r})",
        "import site",
        *(f"site.addsitedir({each!r})" for each in below),
        "import phantom.start",
    ]
    (purelib / "phantom.pth").write_text("; ".join(lines) + "\n")
    link = purelib / "phantom"
    link.unlink(missing_ok=True)
    link.symlink_to(HERE)
    python = folder / "bin" / "python"
    for entry in entry_points(group="console_scripts"):
        if entry.name in SCRIPTS:
            script = folder / "bin" / entry.name
            script.write_text(
                f"#!{python}\nimport sys\nfrom {entry.module} import {entry.attr} as main\nsys.exit(main())\n"
            )
            script.chmod(0o755)
    subprocess.run([python, HERE / "build.py", folder / "device"], check=True)


if __name__ == "__main__":
    main()
