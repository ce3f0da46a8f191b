"""Writes a small checkpoint with this package, which make_goldens.py then loads with lerobot.

PYTHONPATH=.:kernels python tests/goldens/pi05/write_checkpoint.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from soma_lightning.models.pi05.checkpoint import save_weights, write_config
from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.model import PI05Model


def main(folder: Path) -> None:
    sizes = json.loads((Path(__file__).parent / "sizes.json").read_text())
    config = PI05Config(**sizes, chunk_size=10, n_action_steps=5, empty_cameras=1)
    torch.manual_seed(3)
    model = PI05Model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.1 if parameter.dim() == 1 else (0.3 if "dense" in name else 1.0) * parameter[0].numel() ** -0.5
            parameter.normal_(std=std)
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder, "lerobot")
    write_config(config, folder, "lerobot")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
