"""A backend of torch.compile for tests: Dynamo, AOTAutograd and its partitioner are torch's own.

The graphs that they make run as they are, in place of code that g++ would take seconds to minutes for; each call is one
operation, as that of inductor's code is.
"""

from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops import wrap
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = ["REGIONS"]


def region(graph: torch.fx.GraphModule, _: Any) -> Any:
    """Runs the graph as inductor runs its code (torch/_inductor/output_code.py, `wrapped_callable`)."""

    def run(inputs: list[Any]) -> Any:
        given = tuple(inputs)
        inputs.clear()
        return graph(*given)

    code = wrap.InductorCompiledCallable(run)

    def call(inputs: list[Any]) -> Any:
        return wrap.inductor_compiled_code(code, inputs) if is_in_torch_dispatch_mode() else run(inputs)

    return make_boxed_func(lambda *inputs: call(list(inputs)))


REGIONS = aot_autograd(fw_compiler=region, partition_fn=min_cut_rematerialization_partition)
