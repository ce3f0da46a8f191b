"""Manual optimization: clipping that the module asks for, where something else touches the gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn


class Manual(L.LightningModule):
    """Clips and steps by itself."""

    algorithm = "norm"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.net = nn.Linear(6, 3)

    def after_clipping(self) -> None:
        """What happens between clipping and the step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).float().pow(2).mean())
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm=self.algorithm)
        self.after_clipping()
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_scaled_gradients_are_clipped_as_by_the_stock_strategy(
    net: Any, make_trainer: Any, difference: Callable[..., float], algorithm: str
) -> None:
    """With a GradScaler the limit meets gradients that are still scaled: the scaler unscales in the step."""
    models = []
    for strategy in ("auto", "somaspeed"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
        models.append(Manual())
        models[-1].algorithm = algorithm
        trainer = make_trainer(strategy, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        trainer.fit(models[-1], net().loader())
        assert trainer.global_step == 10
    assert difference(*models) == 0.0
    assert difference(Manual(), models[1]) > 0.05


def test_noise_on_clipped_gradients_is_refused(net: Any, make_trainer: Any) -> None:
    """As private training does; inside the fused step the noise would be clipped with the gradients."""

    class Noisy(Manual):
        def after_clipping(self) -> None:
            for p in self.parameters():
                assert p.grad is not None
                p.grad.add_(0.01 * torch.randn_like(p))

    with pytest.raises(RuntimeError, match=r"changed between clipping and step\(\).*fused_optimizer=False"):
        make_trainer("somaspeed").fit(Noisy(), net().loader())
