"""The callback for Lightning: a fit under it learns the same bits, under a plan too, and the module is given back."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memwall.errors import IntegrationError

pytestmark = [pytest.mark.requires("lightning"), pytest.mark.slow]

WIDTH, BATCH = 32, 256


def made(*, calls_forward: bool) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.Sequential(
                *(nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)) for _ in range(4))
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x)

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            out = self(batch[0]) if calls_forward else self.blocks(batch[0])
            return out.square().mean()

        def validation_step(self, batch: list[Tensor], number: int) -> None:
            self.log("loss", self(batch[0]).mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


def fit(module: Any, callback: Any = None, **settings: Any) -> list[Tensor]:
    import lightning

    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4 * BATCH, WIDTH)), batch_size=BATCH)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, callbacks=[callback] if callback else [], **quiet, **settings
        )
        trainer.fit(module, data, data)
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize(("calls_forward", "accumulated"), [(True, 1), (False, 2)])
def test_a_fit_is_recorded_and_planned_and_learns_the_same_bits(calls_forward: bool, accumulated: int) -> None:
    from plans import plan_of

    from memwall.integrations.lightning import LightningCallback
    from memwall.planning.techniques.recompute import Recompute

    settings = {"accumulate_grad_batches": accumulated}
    expected = fit(made(calls_forward=calls_forward), **settings)
    recorded = LightningCallback(budget="8GiB")
    module = made(calls_forward=calls_forward)
    assert all(map(torch.equal, fit(module, recorded, **settings), expected))
    assert recorded.report().measured.steps == 4 // accumulated
    step = recorded.session.trace.steps[0]
    assert {op.phase for op in step.ops} >= {"forward", "backward", "optimizer"}
    assert "forward" not in vars(module), "the module is as it was"
    assert "training_step" not in vars(module), "the module is as it was"
    module = made(calls_forward=calls_forward)
    plan = plan_of(module, Recompute(block="blocks.0"), Recompute(block="blocks.2"))
    planned = LightningCallback(plan=plan)
    assert all(map(torch.equal, fit(module, planned, **settings), expected))


def test_what_it_cannot_follow_is_refused() -> None:
    from types import SimpleNamespace

    from memwall.integrations.lightning import LightningCallback

    class FSDPStrategy: ...

    with pytest.raises(IntegrationError, match="FSDPStrategy shards the module, which memwall does not follow"):
        LightningCallback(budget="8GiB").on_train_start(SimpleNamespace(strategy=FSDPStrategy()), nn.Linear(1, 1))
    with pytest.raises(IntegrationError, match=r"no trainer.fit\(\) was seen"):
        LightningCallback(budget="8GiB").report()
