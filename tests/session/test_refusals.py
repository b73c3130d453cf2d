"""Models that a session does not train are refused in words, before the first step."""

import pytest
import torch
from torch import nn

import memwall
from memwall.errors import ApplyError, UsageError

GIB = 1 << 30


def opened(model: nn.Module) -> None:
    memwall.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), budget=4 * GIB).close()


def test_layers_of_transformer_engine_are_refused_by_name() -> None:
    layer = type("TransformerLayer", (nn.Linear,), {"__module__": "transformer_engine.pytorch.transformer"})
    with pytest.raises(UsageError, match=r"TransformerEngine \(TransformerLayer\).* would count twice"):
        opened(nn.Sequential(layer(2, 2)))


@pytest.mark.gpu
@pytest.mark.phantom(devices=2)
def test_a_model_over_several_devices_is_refused_with_their_names() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    with pytest.raises(UsageError, match=r"spread over 2 devices \(cuda:0, cuda:1\), and a budget is for one"):
        opened(nn.Sequential(nn.Linear(2, 2).to("cuda:0"), nn.Linear(2, 2).to("cuda:1")))


@pytest.mark.gpu
def test_a_step_that_is_captured_is_refused() -> None:
    model = nn.Linear(8, 8).cuda()
    x = torch.randn(4, 8, device="cuda")
    with memwall.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="50%"):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ApplyError, match="captured into a CUDA graph"), torch.cuda.graph(graph):
            model(x)
