"""torch's private names of the compiler: each does what memwall needs. They import it, which takes seconds."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memwall.torch_internals import compiler, partitioner

pytestmark = pytest.mark.slow


def test_compiled_code_is_a_region_and_hooks_run_outside_of_the_compiler() -> None:
    import torch._dynamo
    from torch._higher_order_ops.wrap import inductor_compiled_code
    from torch._inductor import config

    assert compiler.has_compiler()
    assert compiler.is_region(inductor_compiled_code)
    assert not compiler.is_region(torch.ops.aten.add.Tensor)
    with compiler.calls_as_one():
        assert config.wrap_inductor_compiled_regions
    assert not config.wrap_inductor_compiled_regions
    frames: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        frames.append(str(graph.code))
        return graph.forward

    def double(x: Tensor) -> Tensor:
        return x * 2

    hidden = compiler.unseen(double)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch._dynamo.graph_break() or hidden(x), backend=backend)
    assert float(compiled(torch.ones(()))) == 2
    assert not any("mul" in code or "* 2" in code for code in frames)


def test_the_partitioner_saves_what_is_chosen_for_each_graph() -> None:
    torch.compiler.reset()
    seen: list[tuple[float, list[int]]] = []

    def choose(saved_bytes: partitioner.SavedBytes, own: float) -> float:
        seen.append((own, [saved_bytes(ratio) for ratio in (1.0, 0.5, 0.0)]))
        return 0.0

    def saved_by(model: nn.Module) -> int:
        found: set[int] = set()
        own = {parameter.data_ptr() for parameter in model.parameters()}
        leaf = torch.ones(16, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (found.add(t.data_ptr()), t)[1], lambda t: t):
            model(leaf).sum().backward()
        return len(found - own - {leaf.data_ptr()})

    layers = (layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU()))
    model = torch.compile(nn.Sequential(*layers), backend="aot_eager_decomp_partition")
    end = partitioner.cut_by(choose)
    assert end is not None
    num_saved = saved_by(model)  # type: ignore[arg-type]
    end()
    ((own, (whole, half, nothing)),) = seen
    assert own == 1.0
    assert whole > half > nothing == num_saved == 0

    partitioner.start_over()
    assert saved_by(model) > 0  # type: ignore[arg-type]
    assert len(seen) == 1
    partitioner.start_over()
    end = partitioner.budget_ratio(0.0)
    assert end is not None
    assert saved_by(model) == 0  # type: ignore[arg-type]
    end()
    assert torch._functorch.config.activation_memory_budget == 1.0
