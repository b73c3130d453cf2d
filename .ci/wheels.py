"""Build the source distribution, and of it the wheels for Linux, one for each processor; check and run them.

    .venv/bin/python .ci/wheels.py RELEASE_FOLDER DIST

RELEASE_FOLDER has ziglang and auditwheel: zig compiles C for each processor, and for every Linux since glibc 2.17;
auditwheel reads in the libraries whether that is so. The C of another processor runs under qemu-user on Debian's Python
for it; where there is no emulator, a line says that it was built and not run.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEBIAN_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}
GLIBC = (2, 17)
PACKAGES = ("python3-minimal", "libpython3-stdlib")


def environment(release: Path, machine: str) -> dict[str, str]:
    """Returns the environment in which setuptools compiles for a processor."""
    target = f"{machine}-linux-gnu.{'.'.join(map(str, GLIBC))}"
    compiler = f"{release}/ziglang/zig cc -target {target}"
    flags = {"CFLAGS": "-O2 -fPIC", "CC": compiler, "LDSHARED": f"{compiler} -shared -s"}
    return os.environ | flags | {"PYTHONPATH": os.fspath(release)}


def built(source: Path, release: Path, dist: Path, machine: str) -> Path:
    """Returns the wheel for a processor; its tag is manylinux's for every CPython since 3.11."""
    shutil.rmtree(source / "build", ignore_errors=True)
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", dist, f"-C--build-option=--plat-name={tag}"],
        cwd=source,
        env=environment(release, machine),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (wheel,) = dist.glob(f"torch_memwall-*-cp311-abi3-{tag}.whl")
    return wheel


def check_tag(release: Path, wheel: Path) -> None:
    """Ends with an error if the libraries need more than the wheel's tag says, or another processor."""
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel],
        env=os.environ | {"PYTHONPATH": os.fspath(release)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    tag = wheel.stem.rpartition("-")[2]
    if f'"{tag}"' not in " ".join(shown.split()):
        sys.exit(f"{wheel.name} is no {tag}; auditwheel says:\n{shown}")


def python_for(machine: str, folder: Path) -> list[str] | None:
    """Returns the command of a Python that runs libraries for a processor; None where none can be had."""
    if machine == platform.machine():
        return [sys.executable]
    emulator = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    root = _debian_root(DEBIAN_NAMES[machine], folder) if emulator else None
    if emulator is None or root is None:
        return None
    (python,) = root.glob("usr/bin/python3.*")
    site = folder / "site"
    version = python.name.removeprefix("python")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", site, "--only-binary=:all:"]
    pip += ["--python-version", version, "--platform", f"manylinux2014_{machine}"]
    subprocess.run([*pip, "msgspec"], check=True)
    variables = [f"PYTHONHOME={root}/usr", f"PYTHONPATH={site}"]
    return [emulator, "-L", os.fspath(root), *(part for each in variables for part in ("-E", each)), os.fspath(python)]


def _debian_root(architecture: str, folder: Path) -> Path | None:
    """Returns a folder with Debian's Python for a processor; apt's own state stays as it is. None without apt."""
    lists, packages, root = folder / "lists", folder / "packages", folder / "root"
    for each in (lists / "partial", packages, root):
        each.mkdir(parents=True)
    apt = ["apt-get", "-qq", "-o", f"APT::Architecture={architecture}", "-o", f"Dir::State::Lists={lists}"]
    apt += ["-o", f"APT::Architectures={architecture}", "-o", "Dir::State::status=/dev/null", "--no-install-recommends"]
    apt += ["-o", f"Dir::Cache={folder}", "-o", "APT::Sandbox::User=root"]
    try:
        subprocess.run([*apt, "update"], check=True, cwd=packages)
        found = _needed(apt, packages)
        subprocess.run([*apt, "download", *found], check=True, cwd=packages)
        for package in packages.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no Python for {architecture}: {error}", file=sys.stderr)
        return None
    return root


def _needed(apt: list[str], folder: Path) -> list[str]:
    """Returns these packages and all that they hang on."""
    said = subprocess.run([*apt, "-s", "install", *PACKAGES], check=True, cwd=folder, capture_output=True, text=True)
    return [line.split()[1] for line in said.stdout.splitlines() if line.startswith("Inst ")]


def main() -> None:
    release, dist = (Path(name).resolve() for name in sys.argv[1:])
    build = [sys.executable, "-m", "build", "--sdist", "--outdir", dist]
    subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for machine in DEBIAN_NAMES:
        with tempfile.TemporaryDirectory() as folder:
            (archive,) = dist.glob("*.tar.gz")
            shutil.unpack_archive(archive, folder, filter="data")
            wheel = built(Path(folder, archive.name.removesuffix(".tar.gz")), release, dist, machine)
            subprocess.run([sys.executable, ROOT / ".ci/check_wheel.py", wheel], check=True)
            check_tag(release, wheel)
            zipfile.ZipFile(wheel).extractall(Path(folder, "wheel"))
            python = python_for(machine, Path(folder, "debian"))
            if python is None:
                print(f"{wheel.name}: built and checked, not run: there is no emulator of {machine} (qemu-user-static)")
                continue
            subprocess.run([*python, ROOT / ".ci/check_native.py", Path(folder, "wheel")], check=True)


if __name__ == "__main__":
    main()
