"""Two GPUs: ten steps over NCCL equal one process on the concatenated batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import ranks_run, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

STEPS, BATCH = 10, 16


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 7)]
    return nn.Sequential(*layers)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))


def train(layouts: list[str], folder: Path) -> dict[str, Any]:
    import lightning as L  # noqa: N812

    from soma_lightning import FabricSomaSpeedStrategy

    found: dict[str, Any] = {}
    for layout in layouts:
        strategy = FabricSomaSpeedStrategy(layout=layout, report=False)
        fabric = L.Fabric(accelerator="cuda", devices=2, strategy=strategy)
        fabric.launch()
        torch.backends.cuda.matmul.allow_tf32 = False
        model = network(fabric.global_rank)
        model[2].requires_grad_(False)
        wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))[:2]
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(2):
                batch = inputs(2 * step + micro)[fabric.global_rank :: 2].to(fabric.device)
                with fabric.no_backward_sync(wrapped, enabled=micro == 0):
                    fabric.backward(wrapped(batch).pow(2).mean() / 2)
            norm = fabric.clip_gradients(wrapped, optimizer, max_norm=0.05)
            optimizer.step()
        fabric.save(folder / f"{layout}.ckpt", {"model": wrapped, "optimizer": optimizer})
        path = optimizer.path_description
        found[layout] = {"parameters": {n: p.cpu() for n, p in whole(model).items()}, "norm": norm.item(), "path": path}
    return found


def single_process() -> nn.Module:
    model = network()
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            (model(inputs(2 * step + micro)).pow(2).mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return model


def test_ten_steps_equal_one_process(tmp_path: Path) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    layouts = ["fsdp", "replicate"]
    expected = whole(single_process())
    for rank in ranks_run(train, tmp_path, arguments={"layouts": layouts, "folder": tmp_path}):
        for layout in layouts:
            assert rank[layout]["path"] == "Triton kernels"
            for name, value in expected.items():
                difference = (rank[layout]["parameters"][name] - value).abs().max().item()
                assert difference <= 2e-5, f"{layout}: {name} differs by {difference}"
    file = torch.load(tmp_path / "fsdp.ckpt", weights_only=True)
    assert {value.device.type for value in file["model"].values()} == {"cpu"}
