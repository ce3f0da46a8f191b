"""Training on cached features: the same numbers as without, and no image is looked at twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import lightning as L
import pytest
import torch

from soma_lightning.contract import ACTION, IMAGE_PREFIX
from soma_lightning.data import LeRobotDataModule
from soma_lightning.data.feature_cache import SAMPLES
from soma_lightning.models.features import stack_samples
from soma_lightning.models.pi05.prefix import KEYS_VALUES, PrefixCache
from soma_lightning.modules import PI05Module
from soma_lightning.modules.base import TrainingConfig
from tests.ranks import ranks_run


@pytest.fixture
def connected(make_run, recorded):
    """A tiny policy with the statistics of the recorded data, and a batch of ten frames."""
    _, module, _ = make_run("run")
    data = LeRobotDataModule(str(recorded), batch_size=10, feature_cache="device")
    data.connect_policy(module.policy.config)
    module.policy.set_statistics(data.statistics)
    module.connect_features(data)
    batch = next(iter(data.train_dataloader()))
    batch["task"] = ["pick up the cube and " * (row % 3) + "pick up the cube" for row in range(10)]
    return module.policy, data.features, batch


def gradients(policy, batch, **arguments) -> dict[str, torch.Tensor]:
    """The loss and every gradient of fixed draws."""
    policy.zero_grad()
    out = policy.sft_forward(batch, generator=torch.Generator().manual_seed(3), flow_draws=2, **arguments)
    out["loss"].backward()
    grads = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return {"loss": out["loss"].detach(), **grads}


def unequal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def without_images(batch):
    return {key: values for key, values in batch.items() if not key.startswith(IMAGE_PREFIX)}


def test_loss_and_gradients_have_the_bits_of_the_live_ones(connected):
    policy, cache, batch = connected
    live = gradients(policy, batch)
    assert len(live) > 20
    assert unequal(live, gradients(policy, batch, features=cache.features(policy, batch))) == []  # computed now
    blind = without_images(batch)
    assert unequal(live, gradients(policy, blind, features=cache.features(policy, blind))) == []  # read
    lengths = cache.features(policy, blind).lengths
    assert len(set(lengths)) > 1, "rows of one length would not test the padding"


def test_other_companions_change_only_the_order_of_sums(connected):
    policy, cache, batch = connected
    cache.features(policy, batch)
    order = [7, 2, 9]
    few = {key: v[order] if isinstance(v, torch.Tensor) else [v[i] for i in order] for key, v in batch.items()}
    live, cached = gradients(policy, few), gradients(policy, few, features=cache.features(policy, without_images(few)))
    for name in live:
        torch.testing.assert_close(cached[name], live[name], rtol=1e-4, atol=1e-6, msg=name)


def test_padding_is_never_read(connected):
    policy, cache, batch = connected
    features = cache.features(policy, batch)
    for row, length in enumerate(features.lengths):
        features.parts["keys_values"][:, row, length:] = float("nan")
    assert unequal(gradients(policy, batch), gradients(policy, batch, features=features)) == []


def test_sampled_actions_are_the_live_ones(connected):
    policy, cache, batch = connected
    live, cached = (
        policy.sample_actions(batch, generator=torch.Generator().manual_seed(1), **features)
        for features in ({}, {"features": cache.features(policy, batch)})
    )
    assert torch.equal(live, cached)


def test_features_of_a_padded_batch_are_read_as_they_are(connected, monkeypatch):
    policy, _, batch = connected
    batch = {key: values[:2] for key, values in batch.items()}  # the third prompt is as long as prompts can be
    live = policy.sft_forward(batch, generator=torch.Generator().manual_seed(3))["loss"]
    monkeypatch.setattr(policy.model.prefix, "bucket", 32)  # as compiled layers have it
    features = policy.encode_features(batch)
    assert features.parts[KEYS_VALUES].shape[2] > max(features.lengths)
    cached = policy.sft_forward(batch, features=features, generator=torch.Generator().manual_seed(3))["loss"]
    torch.testing.assert_close(cached, live)


def test_a_prefix_survives_the_way_through_single_samples(connected):
    policy, _, batch = connected
    inputs = policy.processor.inputs(batch)
    prefix = policy.model.prefix(inputs.images, inputs.image_masks, inputs.tokens, inputs.token_mask)
    features = prefix.features()
    again = stack_samples([features.sample(row) for row in range(10)], torch.device("cpu"))
    found = PrefixCache.from_features(again, policy.config.language.head_dim)
    assert torch.equal(found.mask, prefix.mask)
    assert torch.equal(found.lengths, prefix.lengths)
    readable = prefix.mask[:, None, :, None]
    for old, new in zip([*prefix.keys, *prefix.values], [*found.keys, *found.values], strict=True):
        assert torch.equal(old.where(readable, 0), new.where(readable, 0))
        assert old.shape == new.shape
        assert old.stride(-1) == new.stride(-1) == 1


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2e-2), ("float8_e4m3fn", 1e-1)])
def test_rounded_features_are_the_same_in_every_epoch_and_near_the_live_ones(connected, recorded, dtype, bound):
    policy, _, batch = connected
    data = LeRobotDataModule(str(recorded), batch_size=10, chunk_size=8, feature_cache="device", feature_dtype=dtype)
    first = gradients(policy, batch, features=data.features.features(policy, batch))
    again = gradients(policy, batch, features=data.features.features(policy, without_images(batch)))
    assert unequal(first, again) == []
    live = gradients(policy, batch)
    assert unequal(live, first) != []
    error = torch.stack([(first[n] - live[n]).square().sum() for n in live]).sum().sqrt()
    assert error / torch.stack([live[n].square().sum() for n in live]).sum().sqrt() < bound


# -------------------------------------------------------------------- whole runs


class Watch(L.Callback):
    """Counts, for each epoch, batches with and without images."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[int, bool]] = Counter()
        self.validated: list[bool] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen[trainer.current_epoch, any(key.startswith(IMAGE_PREFIX) for key in batch)] += 1

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.validated.append(any(key.startswith(IMAGE_PREFIX) for key in batch))


def fit(make_run, recorded, name, epochs=3, **settings):
    trainer, module, _ = make_run(name, max_steps=-1, max_epochs=epochs, callbacks=[watch := Watch()])
    data = LeRobotDataModule(str(recorded), batch_size=8, drop_last=False, **settings)
    trainer.fit(module, data)
    trained = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    return trained, watch, trainer, data


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_on_cached_features_trains_like_a_live_one(make_run, recorded, workers):
    live, _, plain, _ = fit(make_run, recorded, "live")
    cached, watch, trainer, data = fit(make_run, recorded, "cached", feature_cache="device", num_workers=workers)
    for name in live:
        torch.testing.assert_close(cached[name], live[name], rtol=1e-3, atol=1e-5, msg=name)
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(float(plain.callback_metrics["val_loss"]), 1e-4)
    assert watch.seen[0, False] == 0
    assert watch.seen[2, True] == 0, "images were loaded although every feature is known"
    assert watch.validated[0]
    assert not watch.validated[-1]
    assert trainer.callback_metrics["feature_hit_percent"] == 100
    assert data.features.num_present == data.num_frames


def test_images_of_known_frames_are_not_decoded(make_run, recorded, monkeypatch):
    from soma_lightning.data.lerobot_images import EncodedImages

    decoded: Counter[tuple[str, int]] = Counter()
    original = EncodedImages.decode

    def counted(self, camera, row):
        decoded[camera, int(self._frames.index[row])] += 1
        return original(self, camera, row)

    monkeypatch.setattr(EncodedImages, "decode", counted)
    _, _, _, data = fit(make_run, recorded, "run", feature_cache="device")
    assert set(decoded.values()) == {1}
    assert len(decoded) == 2 * data.num_frames


def test_a_batch_of_known_and_unknown_frames_decodes_the_unknown(recorded):
    data = LeRobotDataModule(str(recorded), batch_size=4, chunk_size=2, feature_cache="device")
    data.connect_features()
    whole = LeRobotDataModule(str(recorded), batch_size=4, chunk_size=2).train_data.__getitems__([3, 20, 5])
    number = int(whole["index"][1])
    data.features.present[number] = 1
    batch = data.train_data.__getitems__([3, 20, 5])
    assert batch[SAMPLES] == whole["index"].tolist()
    key = "observation.images.image"
    assert torch.equal(batch[key][[0, 2]], whole[key][[0, 2]])
    assert not batch[key][1].any()
    assert torch.equal(batch[ACTION], whole[ACTION])


def test_a_mixture_numbers_its_frames_apart_in_both_splits(recorded, make_run, tmp_path):
    """One data set has no validation episodes, so that the parts of the two splits do not correspond."""
    roots = [{"root": str(recorded), "episodes": "0"}, {"root": str(recorded), "episodes": "1:6"}]
    trainer, module, _ = make_run("run", max_steps=-1, max_epochs=2)
    from soma_lightning.data import DataSource

    data = LeRobotDataModule([DataSource(**root) for root in roots], batch_size=8, feature_cache="device")
    assert [bool(val) for _, val in data.splits] == [False, True]
    trainer.fit(module, data)
    train = {n for i in range(len(data.train_data)) for n in data.train_data.__getitems__([i])[SAMPLES]}
    val = {n for i in range(len(data.val_data)) for n in data.val_data.__getitems__([i])[SAMPLES]}
    assert len(train) == len(data.train_data)
    assert len(val) == len(data.val_data)
    assert not train & val
    assert min(val) >= 72, "the second source's numbers begin behind all frames of the first"


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float8_e4m3fn"])
def test_the_memory_estimate_counts_what_is_kept_on_the_device(make_run, recorded, dtype):
    trainer, module, _ = make_run("run", max_epochs=1, max_steps=-1)
    data = LeRobotDataModule(str(recorded), batch_size=8, feature_cache="device", feature_dtype=dtype)
    trainer.fit(module, data)
    facts = data.features.report_facts()
    stored = facts["bytes_per_sample"] * facts["expected_samples"]
    assert module.memory_estimate().features == pytest.approx(stored, rel=0.15)  # scales of fp8 are not counted
    report = json.loads((Path(trainer.default_root_dir) / "run_report.json").read_text())
    assert "stored features" in report["model"]["memory_estimate"]


# -------------------------------------------------------------------- what cannot be cached


@pytest.mark.parametrize(
    ("model", "training", "data", "message"),
    [
        ({"trainable": "all"}, {}, {}, "trainable='all'"),
        ({}, {"state_noise": 0.1}, {}, "state_noise=0.1"),
        ({}, {}, {"feature_cache": "pinned"}, "serves a CUDA device"),
    ],
)
def test_a_run_whose_features_change_is_refused(make_run, recorded, model, training, data, message):
    trainer, module, _ = make_run("run", model=model, training=training)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, LeRobotDataModule(str(recorded), batch_size=8, **{"feature_cache": "device", **data}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_cache": "device", "augment": "light"}, "augment varies the images"),
        ({"feature_dtype": "bfloat16"}, "no effect without feature_cache"),
        ({"feature_cache": "device", "feature_dtype": "fp8"}, "'fp8' is unknown"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(recorded, settings, message):
    with pytest.raises(ValueError, match=message):
        LeRobotDataModule(str(recorded), **settings)


def test_a_module_that_reads_no_features_is_told(recorded):
    data = LeRobotDataModule(str(recorded), batch_size=4, chunk_size=2, feature_cache="device")
    with pytest.raises(ValueError, match="would be ignored"):
        data.train_dataloader()


def test_features_that_do_not_fit_are_refused_before_any_is_stored(connected, recorded, monkeypatch):
    policy, _, batch = connected
    monkeypatch.setattr("soma_lightning.data.feature_memory.available_host_bytes", lambda: 10**6)
    data = LeRobotDataModule(str(recorded), batch_size=10, chunk_size=8, feature_cache="device")
    with pytest.raises(ValueError, match=r"does not fit: .* bytes a sample"):
        data.features.features(policy, batch)
    assert data.features.num_present == 0


# -------------------------------------------------------------------- several ranks


def fit_on_ranks(root: str, folder: str) -> dict[str, dict[str, float]]:
    return {str(where): fit_one(root, folder, where) for where in (None, "device", f"{folder}/features")}


def fit_one(root: str, folder: str, where: str | None) -> dict[str, float]:
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    module = PI05Module(size="tiny", training=TrainingConfig(lr=1e-3, final_lr=1e-4, export=False))
    trainer = L.Trainer(
        strategy="somaspeed",
        default_root_dir=folder,
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    data = LeRobotDataModule(root, batch_size=6, feature_cache=where)
    trainer.fit(module, data)
    return {
        "loss": float(trainer.callback_metrics["val_loss"]),
        "hits": float(trainer.callback_metrics.get("feature_hit_percent", -1)),
        "present": data.features.num_present if data.features is not None else 0,
    }


def test_each_rank_caches_what_it_meets_and_a_folder_is_shared(recorded: Path, tmp_path: Path):
    ranks = ranks_run(fit_on_ranks, tmp_path, arguments={"root": str(recorded), "folder": str(tmp_path)})
    live, memory, folder = ranks[0].values()
    assert memory["loss"] == pytest.approx(live["loss"], rel=1e-4)
    assert folder["loss"] == pytest.approx(live["loss"], rel=1e-4)
    assert [rank["device"]["loss"] for rank in ranks] == [memory["loss"]] * 2
    assert 0 < memory["hits"] < 100  # an epoch gives a rank other samples
    assert all(30 < rank["device"]["present"] < 72 for rank in ranks)
    assert folder["hits"] > memory["hits"]
    assert folder["present"] == 72
