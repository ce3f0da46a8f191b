"""A run that waits for its data says so, once, with what would help."""

from __future__ import annotations

import time
import warnings

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from soma_lightning.data.sampling import EpochSampler, ResumableDataLoader
from soma_lightning.modules.timing import StepTimer, _Mark


class SlowData(Dataset):
    """Every sample takes `wait_s` to load."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict:
        time.sleep(self.wait_s)
        return {"x": torch.ones(1), "task": "reach"}


class SlowModule(L.LightningModule):
    """Every step takes `step_s`; writes down what the progress bar would show."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s, self.weight, self.shown = step_s, torch.nn.Parameter(torch.zeros(())), []

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_s)
        return self.weight * batch["x"].mean()

    def validation_step(self, batch, batch_idx: int) -> None:
        time.sleep(0.05)

    def on_train_batch_start(self, batch, batch_idx: int) -> None:
        self.shown.append(dict(self.trainer.progress_bar_metrics))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def __init__(self, wait_s: float, advice: str | None = None, loader: type = ResumableDataLoader) -> None:
        super().__init__()
        self.wait_s, self.loader = wait_s, loader
        if advice is not None:
            self.loading_advice = lambda: advice

    def train_dataloader(self) -> DataLoader:
        data = SlowData(self.wait_s)
        return self.loader(data, batch_size=1, sampler=EpochSampler(data))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(SlowData(0.0), batch_size=1)


def fit(data: Data, step_s: float, more=(), **settings) -> tuple[SlowModule, list[str]]:
    module = SlowModule(step_s)
    trainer = L.Trainer(
        max_steps=32,
        accelerator="cpu",
        devices=1,
        log_every_n_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[StepTimer(), *more],
        **settings,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=data)
    return module, [str(w.message) for w in caught if "waits for data" in str(w.message)]


def test_a_data_bound_run_says_so_once():
    module, said = fit(Data(0.02, advice="raise data.num_workers"), 0.005, limit_val_batches=0)
    percent = float(module.shown[-1]["data_percent"])
    assert 40 < percent < 95  # 20 ms of about 25 ms, less on a busy machine
    assert len(said) == 1
    assert said[0].startswith("this run waits for data ")
    assert said[0].endswith(" % of the time; raise data.num_workers")


def test_a_run_that_does_not_wait_says_nothing():
    module, said = fit(Data(0.0), 0.02, limit_val_batches=0)
    assert float(module.shown[-1]["data_percent"]) < 25
    assert said == []


def test_a_loader_that_does_not_measure():
    _, said = fit(Data(0.02, loader=DataLoader), 0.005, limit_val_batches=0)
    assert said[0].endswith("load batches with more workers")


def test_other_callbacks_are_no_waiting():
    """A checkpoint that takes long to write is not the data's fault."""
    slow = L.Callback()
    slow.on_train_batch_end = lambda *args: time.sleep(0.02)
    module, said = fit(Data(0.0), 0.005, limit_val_batches=0, more=[slow])
    assert float(module.shown[-1]["data_percent"]) < 25
    assert said == []


def test_validation_is_no_waiting():
    module, said = fit(Data(0.0), 0.02, limit_val_batches=4, val_check_interval=6, check_val_every_n_epoch=None)
    last = module.shown[-1]
    assert float(last["data_percent"]) < 25
    assert float(last["samples_per_s"]) > 25  # about 45; validation between the steps would make it 15
    assert said == []


def test_a_late_batch_delays_nothing_while_the_device_is_busy(monkeypatch: pytest.MonkeyPatch):
    """On CUDA the host waited 0.8 s of every second, but the device was idle for 0.1 s only."""
    monkeypatch.setattr(_Mark, "seconds_until", lambda self, later: later.device - self.device)

    def mark(host: float, device: float) -> _Mark:
        made = _Mark(torch.device("cpu"))
        made.host, made.device = host, device
        return made

    logged = {}
    module = L.LightningModule()
    module._trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    module.log = lambda name, value, **_: logged.update({name: value})
    timer = StepTimer()
    for step in range(12):
        times = [(0.0, 0.5), (0.8, 0.6), (0.9, 0.9), (0.95, 1.3), (1.0, 1.5)]  # of host and device
        timer._steps.append((0.75, [mark(step + host, step + device) for host, device in times]))
    timer._samples = 12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timer._log(module)
    assert logged["data_percent"] == pytest.approx(10)
    assert logged["data_ms"] == pytest.approx(800)
