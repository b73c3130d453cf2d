"""Fuzzes one reader under the guidance of its coverage, by atheris (libFuzzer): `make fuzz`.

    python tests/fuzz/fuzz.py trace FOLDER -max_total_time=60

FOLDER gets the corpus of the reader, which begins with what corpus.tar.xz has kept, and FOLDER/crashes the file that
failed, whose mend brings a test with it. Options after it are libFuzzer's.
"""

import contextlib
import functools
import os
import random
import shlex
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    import atheris

    name, folder, *options = sys.argv[1:]
    kept_in = Path(folder).resolve()  # before the current folder is another one
    corpus, crashes = kept_in / name, kept_in / "crashes"
    corpus.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(exist_ok=True)
    sys.path[:0] = [str(HERE), *map(str, (HERE.parent / "trace", HERE.parent, HERE.parents[1] / "benchmarks"))]
    work = Path(tempfile.mkdtemp(prefix="memwall-fuzz-"))
    inside = work / "in"
    inside.mkdir()
    os.chdir(work)
    from corpus import kept

    with atheris.instrument_imports(include=["memwall"]):
        import readers
        import seeds
        import structured
        import typer.main

        typer.main.get_command = functools.cache(typer.main.get_command)  # which takes longer than most files
        made = work / "made"
        made.mkdir()
        with contextlib.redirect_stdout(sys.stderr):
            whole = [*seeds.seeds(made)[name], *kept(name)]
        for number, seed in enumerate(whole):
            (corpus / f"seed{number}").write_bytes(seed)
            readers.check(name, seed, inside)  # commands import what they need when they run

    # Of the clock: on a busy machine a file of two bytes has taken half a minute.
    limits = ["-timeout=120", "-rss_limit_mb=3000", "-max_len=65536", f"-artifact_prefix={crashes}/{name}-"]

    def changed(data: bytes, most_bytes: int, seed: int) -> bytes:
        made = structured.mutated(data, random.Random(seed), lambda given: atheris.Mutate(given, most_bytes))
        return made[:most_bytes]

    again = shlex.join(
        [sys.executable, str(HERE / "fuzz.py"), name, str(kept_in)]
    )  # what a merge starts its workers by
    arguments = [again, *limits, *options, str(corpus)]
    atheris.Setup(arguments, lambda data: readers.check(name, data, inside), custom_mutator=changed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
