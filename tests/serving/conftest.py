"""A tiny pi0.5 on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from soma_lightning.envs import SomaTable
from soma_lightning.models import PI05Config, PI05Policy


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its actions depend on all that it sees: what starts at zero does not stay there."""
    torch.manual_seed(5)
    policy = PI05Policy(PI05Config.tiny(), SomaTable.statistics())
    policy.reset_parameters()
    for parameter in policy.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("served") / "policy"
    policy.save_pretrained(folder)
    return folder
