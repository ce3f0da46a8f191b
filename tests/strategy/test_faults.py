"""A rank that fails ends the job soon, with its own traceback last; nothing waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, start_ranks

SCRIPT = """
import os, time
import lightning as L
import torch
import soma_lightning

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 21 and "{failing}" == os.environ.get("LOCAL_RANK", "0"):
            print("failing at", time.time(), flush=True)
            raise OSError("cannot read episode 21")
        return torch.ones(4)

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

strategy = soma_lightning.SomaSpeedStrategy(report=False, timeout=600)
trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=60, logger=False, max_epochs=-1,
                    enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False)
trainer.fit(Net(), torch.utils.data.DataLoader(Data(), batch_size=4))
"""


def run_script(folder: Path, failing: int) -> tuple[subprocess.CompletedProcess[str], float]:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("{failing}", str(failing)))
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, timeout=240)
    return done, seconds_since_failure(done.stdout)


def seconds_since_failure(output: str) -> float:
    """From the failure on: what a loaded machine needs to start is not the point."""
    return time.time() - float(output.partition("failing at ")[2].split()[0])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_data_set_ends_the_script_with_its_traceback(tmp_path: Path, failing: int) -> None:
    """Lightning's own launcher: rank 0 is the script, rank 1 its child."""
    done, seconds = run_script(tmp_path, failing)
    assert done.returncode != 0
    assert seconds < 60
    last = done.stderr.rindex("Traceback")
    assert "cannot read episode 21" in done.stderr[last:], done.stderr[-3000:]


def wait_for_ever() -> None:
    """Rank 0 waits in a collective that does not come; rank 1 raises outside any loop of Lightning."""
    import lightning as L  # noqa: N812
    import torch

    from soma_lightning import FabricSomaSpeedStrategy

    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricSomaSpeedStrategy(timeout=600))
    fabric.launch()
    if fabric.global_rank == 0:
        try:
            fabric.all_reduce(torch.ones(()))
        finally:
            time.sleep(600)  # as a rank that is stuck in a kernel, whatever its peers do
    print("failing at", time.time(), flush=True)
    raise OSError("rank 1 is out of luck")


def leave_early() -> None:
    """Rank 1 leaves its training by `sys.exit(0)`; rank 0 waits for it."""
    from tests.strategy.test_sharded_trainer import Net, loader, make_trainer

    class Leaving(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.global_rank == 1:
                print("failing at", time.time(), flush=True)
                sys.exit(0)
            time.sleep(600)  # as a rank that is stuck in a kernel, whatever its peers do

    make_trainer().fit(Leaving(), loader())


def test_a_rank_that_leaves_its_training_ends_the_others(tmp_path: Path) -> None:
    codes = run_both(leave_early, tmp_path)
    assert codes == [1, 0]
    log = (tmp_path / "0.log").read_text()
    assert "rank 0 ends because rank 1 failed:" in log
    assert log.rstrip().endswith("SystemExit: 0")


def test_a_rank_that_waits_is_ended_and_says_why(tmp_path: Path) -> None:
    codes = run_both(wait_for_ever, tmp_path)
    assert codes == [1, 1]
    log = (tmp_path / "0.log").read_text()
    assert "rank 0 ends because rank 1 failed:" in log
    assert log.rstrip().endswith("OSError: rank 1 is out of luck")


def run_both(function: Any, tmp_path: Path) -> list[Any]:
    """Exit codes of both ranks; rank 0 must follow rank 1 within a minute."""
    processes = start_ranks(function, tmp_path, 2, {})
    codes: list[Any] = []
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert seconds_since_failure((tmp_path / "1.log").read_text()) < 60
    return codes
