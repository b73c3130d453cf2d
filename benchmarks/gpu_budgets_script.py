"""A script that knows nothing of memwall: a GPT on CUDA. It writes peaks and seconds of its steps, and its digest.

python benchmarks/gpu_budgets_script.py OUTPUT WIDTH LAYERS TOKENS SAMPLES
"""

import hashlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from phantom_budgets_script import Language, used_bytes

_NUM_STEPS = 6
_VOCABULARY = 256


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    width, layers, length, samples = (int(word) for word in sys.argv[2:])
    model = Language(is_llama=False, num_layers=layers, width=width, length=length).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, _VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(1)).cuda()
    # A peak begins where forward does: what the step before has left free, and is given back until then, is that one's.
    model.register_forward_pre_hook(lambda *_: torch.cuda.reset_peak_memory_stats())
    peaks, seconds = [], []
    for _ in range(_NUM_STEPS):
        begin = time.perf_counter()
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        peaks.append(used_bytes())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    found = {"peak_bytes": peaks, "step_seconds": statistics.median(seconds[2:]), "digest": digest.hexdigest()}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
