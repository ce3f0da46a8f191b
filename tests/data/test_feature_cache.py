"""A folder of features: what survives, what is refused, and what several writers do to it."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from soma_lightning.data import feature_shards
from soma_lightning.data.feature_cache import SAMPLES, FeatureCache, check_feature_settings
from soma_lightning.data.feature_dtypes import decode_parts, encode_parts
from soma_lightning.data.feature_identity import data_identity
from soma_lightning.data.feature_shards import FolderStore
from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.models.features import FrozenFeatures

IDENTITY = {"policy": {"backbone": "abc"}, "data": {"frames": 3}}


class FakePolicy:
    """Features of two streams that say which sample they are of; sample n has n + 1 tokens."""

    device = torch.device("cpu")

    def __init__(self, backbone: str = "abc") -> None:
        self.backbone = backbone
        self.encoded: list[int] = []

    def check_features_fixed(self) -> None:
        return None

    def feature_identity(self) -> dict:
        return {"backbone": self.backbone}

    def encode_features(self, batch) -> FrozenFeatures:
        keys = batch[SAMPLES]
        self.encoded += keys
        values = torch.tensor(keys).float().view(1, -1, 1, 1).expand(2, -1, max(keys) + 1, 4) + torch.arange(4) / 7
        return FrozenFeatures(
            {"hidden": values, "kind": torch.ones(1, *values.shape[1:3], 1, dtype=torch.int8)},
            tuple(key + 1 for key in keys),
        )


def read(cache: FeatureCache, policy: FakePolicy, keys: list[int]) -> FrozenFeatures:
    features = cache.features(policy, {SAMPLES: keys})
    assert features.lengths == tuple(key + 1 for key in keys)
    for row, key in enumerate(keys):
        sample = features.sample(row)
        torch.testing.assert_close(sample["hidden"][0, :, 0], torch.full((key + 1,), float(key)), rtol=0.05, atol=0)
        assert sample["hidden"].dtype == torch.float32
        assert sample["kind"].dtype == torch.int8
        assert sample["kind"].all()
    return features


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float8_e4m3fn"])
def test_a_second_run_reads_what_the_first_one_wrote(tmp_path, dtype):
    first = FeatureCache(str(tmp_path / "c"), 9, dtype=dtype)
    before = read(first, policy := FakePolicy(), [4, 1, 1, 7])
    first.flush()
    assert policy.encoded == [4, 1, 1, 7]
    second = FeatureCache(str(tmp_path / "c"), 9, dtype=dtype)
    after = read(second, policy := FakePolicy(), [4, 1, 1, 7])
    assert policy.encoded == []
    assert torch.equal(before.sample(3)["hidden"], after.sample(3)["hidden"])
    assert second.present.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    read(second, policy, [7, 8])
    assert policy.encoded == [8]


def test_shards_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_shards, "SHARD_BYTES", 200)
    cache = FeatureCache(str(tmp_path), 20)
    read(cache, FakePolicy(), list(range(20)))
    cache.flush()
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    read(FeatureCache(str(tmp_path), 20), policy := FakePolicy(), list(range(20)))
    assert policy.encoded == []


def test_two_writers_find_each_other_after_a_refresh(tmp_path):
    caches, policies = [FeatureCache(str(tmp_path), 9) for _ in range(2)], [FakePolicy(), FakePolicy()]
    for rank, keys in enumerate(([0, 2], [3, 2])):
        read(caches[rank], policies[rank], keys)
    for cache in caches:
        cache.flush()
    for cache, policy in zip(caches, policies, strict=True):
        cache.refresh()
        policy.encoded.clear()
        read(cache, policy, [0, 2, 3])
        assert policy.encoded == []


def fill_without_end(folder: str) -> None:
    feature_shards.SHARD_BYTES = 2000
    cache, policy = FeatureCache(folder, 5000), FakePolicy()
    for key in range(5000):
        read(cache, policy, [key])


def test_what_a_killed_run_had_written_is_whole(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=fill_without_end, args=(str(tmp_path),))
    process.start()
    deadline = time.monotonic() + 50
    while len(list(tmp_path.glob("*.safetensors"))) < 3:
        assert time.monotonic() < deadline
        assert process.is_alive()
        time.sleep(0.005)
    process.kill()
    process.join()
    cache = FeatureCache(str(tmp_path), 5000)
    policy = FakePolicy()
    read(cache, policy, [0])
    there = [int(key) for key in cache.present.nonzero().flatten()]
    policy.encoded.clear()
    read(cache, policy, there)
    assert len(there) > 3
    assert policy.encoded == []


def test_a_file_that_a_killed_run_left_aside_is_no_shard_and_goes_when_it_is_old(tmp_path):
    FolderStore(tmp_path, IDENTITY)
    fresh, old = tmp_path / "a.safetensors.partial", tmp_path / "b.safetensors.partial"
    for path in (fresh, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert list(FolderStore(tmp_path, IDENTITY).keys()) == []
    assert fresh.exists()
    assert not old.exists()


def test_another_identity_is_refused_and_named(tmp_path):
    read(FeatureCache(str(tmp_path), 9), FakePolicy(), [1])
    with pytest.raises(ValueError, match=r'policy.backbone \("abc" there, "xyz" here\).*name another folder'):
        read(FeatureCache(str(tmp_path), 9), FakePolicy("xyz"), [1])
    with pytest.raises(ValueError, match=r'features.dtype \("auto" there, "bfloat16" here\)'):
        read(FeatureCache(str(tmp_path), 9, dtype="bfloat16"), FakePolicy(), [1])
    with pytest.raises(ValueError, match="policy.autocast"), torch.autocast("cpu", torch.bfloat16):
        read(FeatureCache(str(tmp_path), 9), FakePolicy(), [1])
    with pytest.raises(ValueError, match=r"data.source 0 \(null there"):
        read(FeatureCache(str(tmp_path), 9, data=lambda: {"source 0": {"frames": 3}}), FakePolicy(), [1])


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is no feature cache, it holds \['thesis.txt'\]"):
        FolderStore(tmp_path, IDENTITY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read as JSON"),
        ("\xff", "cannot be read as JSON"),
        ("[]", "does not say what the features are of"),
        ('{"policy": null}', "does not say what the features are of"),
    ],
)
def test_a_damaged_identity_is_named(content, message, tmp_path):
    FolderStore(tmp_path, IDENTITY)
    (tmp_path / "cache.json").write_text(content, encoding="latin1")
    with pytest.raises(ValueError, match=rf"cache\.json {message}"):
        FolderStore(tmp_path, IDENTITY)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "notes").touch()
    with pytest.raises(ValueError, match="notes' is a file; name a folder"):
        FolderStore(tmp_path / "notes", IDENTITY)


@pytest.mark.parametrize(
    "where", ["Device", "pinned ", "pined", "devices", "gpu", "CUDA", "ram", "", "s3://bucket/features"]
)
def test_a_slip_in_the_name_of_a_memory_makes_no_folder(where):
    with pytest.raises(ValueError, match="feature_cache="):
        check_feature_settings(where, "auto", augments=False)
    for fine in ("device", "pinned", "./Device", "./gpu", "features", "outputs/device_features"):
        check_feature_settings(fine, "auto", augments=False)


def test_a_shard_of_another_folder_is_refused(tmp_path):
    other = FeatureCache(str(tmp_path / "b"), 9)
    read(other, FakePolicy("xyz"), [1, 2])
    other.flush()
    shard = next((tmp_path / "b").glob("*.safetensors"))
    mine = FeatureCache(str(tmp_path / "a"), 9)
    read(mine, FakePolicy(), [3])
    shard.rename(tmp_path / "a" / shard.name)
    with pytest.raises(ValueError, match=rf"{shard.name} holds features of something else than cache\.json"):
        mine.refresh()
    with pytest.raises(ValueError, match=f"{shard.name} holds features of something else"):
        read(FeatureCache(str(tmp_path / "a"), 9), FakePolicy(), [1])


def test_a_full_disk_is_one_error_and_loses_no_shard(tmp_path, monkeypatch):
    cache = FeatureCache(str(tmp_path), 9)
    read(cache, FakePolicy(), [1])
    cache.flush()

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(feature_shards, "save_file", full)
        read(cache, FakePolicy(), [2])
        with pytest.raises(OSError, match=r"cannot be written \(I/O error: No space left.*make room and start again"):
            cache.flush()
    assert list(tmp_path.glob("*.partial")) == []
    policy = FakePolicy()
    read(FeatureCache(str(tmp_path), 9), policy, [1, 2])
    assert policy.encoded == [2]
    cache.flush()  # what was held back is not lost
    read(FeatureCache(str(tmp_path), 9), policy, [2])
    assert policy.encoded == [2]


def test_a_damaged_shard_is_named(tmp_path):
    cache = FeatureCache(str(tmp_path), 9)
    read(cache, FakePolicy(), [1, 2])
    cache.flush()
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ValueError, match=rf"{shard.name} is damaged"):
        read(FeatureCache(str(tmp_path), 9), FakePolicy(), [1])


def test_fp8_keeps_tokens_of_any_size_and_rounds_by_at_most_a_sixteenth():
    values = torch.randn(3, 2, 5, 64, generator=torch.Generator().manual_seed(0))
    values *= torch.logspace(-20, 20, 30).view(3, 2, 5, 1)
    values[0, 0, 0] = 0
    encoded = encode_parts({"x": values, "mask": torch.ones(1, 2, 5, 1, dtype=torch.bool)}, "float8_e4m3fn")
    assert sum(v.nbytes for v in encoded.values()) == 30 * (64 + 4) + 10
    decoded = decode_parts(encoded)
    assert set(decoded) == {"x", "mask"}
    error = (decoded["x"] - values).abs()
    # Half a step of three mantissa bits, or half the smallest subnormal (2^-9) beside a largest value of 448.
    bound = torch.maximum(values.abs() / 16, values.abs().amax(-1, keepdim=True) * 2**-10 / 448)
    assert (error <= 1.001 * bound).all()


def test_the_identity_of_data_ignores_paths_and_filters_and_sees_content(record):
    def identity(root: Path, **reading) -> str:
        return json.dumps(data_identity([LeRobotDataset(root, **reading)]), sort_keys=True)

    root = record()
    before = identity(root)
    root = root.rename(root.with_name("moved"))
    assert identity(root) == before
    assert identity(root, episodes=[1]) == before
    assert identity(root, action_indices=[0]) == before
    assert identity(root, state_indices=[0, 1]) != before
    assert identity(record(name="longer", lengths=(5, 7, 4, 7))) != before
    assert identity(record(name="other", tasks=("pick up the ball", "reach the green disc"))) != before
    assert identity(record(name="offset", offset=1.0)) != before
