"""What others say of their predictors, never beside our figures without its tag: `claimed` by the authors, or `source`:
read in the code, the tests or the data that they published. None of it was measured here.
"""

from typing import Literal

from msgspec import Struct

__all__ = ["CLAIMS", "Claim", "claims_table"]


class Claim(Struct, frozen=True, kw_only=True):
    """One figure of somebody else."""

    predictor: str
    figure: str
    scope: str
    where: str
    tag: Literal["claimed", "source"]


CLAIMS = (
    Claim(
        predictor="xMem",
        figure="median relative error -91 %, out of memory at the estimate -75 %, memory saved +368 %",
        scope="5,209 runs of 25 models on one GPU; against DNNMem, SchedTune and LLMem, no absolute error",
        where="arXiv 2510.21048",
        tag="claimed",
    ),
    Claim(
        predictor="VeritasEst",
        figure="error -84 %, failed runs -73 %",
        scope="convolutional networks; against others",
        where="arXiv 2504.03887",
        tag="claimed",
    ),
    Claim(
        predictor="LLMem",
        figure="error up to 1.6 % on one GPU, 3.0 % in the mean on several",
        scope="decoder-only language models",
        where="arXiv 2404.10933",
        tag="claimed",
    ),
    Claim(
        predictor="torch-preflight",
        figure="error 3.7 % in the mean, worst -12.4 %",
        scope="the eight runs on a T4 above",
        where="its docs/vram-estimation.md",
        tag="claimed",
    ),
    Claim(
        predictor="accelerate estimate-memory",
        figure='"within a few percent"',
        scope="size of a loaded model; no activations",
        where="its documentation",
        tag="claimed",
    ),
    Claim(
        predictor="GPUMemNet",
        figure="right bucket of 1-2 GB or 8-10 GB: 98 % (MLP), 82 % (CNN), 87 % (transformer)",
        scope="its own runs on an A100",
        where="itu-rad/GPUMemNet",
        tag="source",
    ),
    Claim(
        predictor="MemTracker",
        figure="its test allows 10 % of the active peak in either direction",
        scope="live bytes, on a GPU",
        where="pytorch/pytorch, test/distributed/_tools",
        tag="source",
    ),
)


def claims_table() -> str:
    """Returns all of them as a Markdown table."""
    lines = ["| predictor | figure | over | where | tag |", "|" + " --- |" * 5]
    lines += [f"| {c.predictor} | {c.figure} | {c.scope} | {c.where} | [{c.tag}] |" for c in CLAIMS]
    return "\n".join(lines)
