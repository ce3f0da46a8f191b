"""The order of epochs, resuming inside one, and the split by episode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import _update_dataloader
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from soma_lightning.data.sampling import EpochSampler, ResumableDataLoader, split_episodes

DATA = torch.arange(23)


def loader(seed: int = 0, num_workers: int = 0, **settings: Any) -> ResumableDataLoader:
    workers = {"multiprocessing_context": "spawn", "persistent_workers": True} if num_workers else {}
    return ResumableDataLoader(
        DATA, batch_size=4, sampler=EpochSampler(DATA, seed), num_workers=num_workers, **workers, **settings
    )


def epochs(count: int, **settings: Any) -> list[list[list[int]]]:
    source = loader(**settings)
    return [[batch.tolist() for batch in source] for _ in range(count)]


def test_every_frame_once_an_epoch_and_every_epoch_another_order() -> None:
    first, second = epochs(2)
    for epoch in (first, second):
        assert sorted(sum(epoch, [])) == DATA.tolist()
    assert first != second
    assert epochs(2) == [first, second]


def test_seed_and_epoch_make_independent_orders() -> None:
    orders = set()
    for seed in range(4):
        sampler = EpochSampler(DATA, seed)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            orders.add(tuple(sampler))
    assert len(orders) == 16


def test_an_epoch_that_is_set_counts() -> None:
    expected = epochs(3)
    source = loader()
    source.sampler.set_epoch(2)
    assert [batch.tolist() for batch in source] == expected[2]
    source.sampler.set_epoch(0)
    assert [batch.tolist() for batch in source] == expected[0]


def test_drop_last() -> None:
    source = loader(drop_last=True)
    assert len(source) == 5
    assert [len(batch) for batch in source] == [4] * 5


@pytest.mark.parametrize("stop", [0, 1, 3, 6])
def test_resumes_after_any_batch(stop: int) -> None:
    expected = epochs(3)
    interrupted = loader()
    list(interrupted)  # epoch 0
    running = iter(interrupted)
    assert [next(running).tolist() for _ in range(stop)] == expected[1][:stop]
    state = interrupted.state_dict()
    assert state == ({"epoch": 2, "batches": 0} if stop == 6 else {"epoch": 1, "batches": stop})

    resumed = loader()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert len(resumed) == 6
    rest = [batch.tolist() for batch in resumed]
    assert rest == (expected[2] if stop == 6 else expected[1][stop:])
    if stop < 6:
        assert [batch.tolist() for batch in resumed] == expected[2]


def test_state_counts_on_after_resuming() -> None:
    source = loader()
    source.load_state_dict({"epoch": 3, "batches": 2})
    running = iter(source)
    next(running)
    assert source.state_dict() == {"epoch": 3, "batches": 3}


def test_workers_resume_and_do_not_count_what_they_prefetch() -> None:
    expected = epochs(3)
    source = loader(num_workers=1, prefetch_factor=3)
    source.load_state_dict({"epoch": 1, "batches": 2})
    running = iter(source)
    assert next(running).tolist() == expected[1][2]
    assert source.state_dict() == {"epoch": 1, "batches": 3}
    assert [batch.tolist() for batch in running] == expected[1][3:]
    assert [batch.tolist() for batch in source] == expected[2]


def test_lightning_can_share_an_epoch_out_over_ranks() -> None:
    """Lightning wraps the sampler and builds the loader anew; the state counts one rank's batches."""

    def make(rank: int) -> ResumableDataLoader:
        original = loader(seed=3)
        wrapper = DistributedSamplerWrapper(original.sampler, num_replicas=2, rank=rank, shuffle=True)
        rebuilt = _update_dataloader(original, wrapper)
        assert isinstance(rebuilt, ResumableDataLoader)
        rebuilt.load_state_dict({"epoch": 1, "batches": 0})
        return rebuilt

    shares = [[batch.tolist() for batch in make(rank)] for rank in (0, 1)]
    frames = sum(shares[0] + shares[1], [])
    assert len(frames) == 24  # 23 frames; the last place is filled up
    assert set(frames) == set(DATA.tolist())
    for rank in (0, 1):
        resumed = make(rank)
        resumed.load_state_dict({"epoch": 1, "batches": 2})
        assert [batch.tolist() for batch in resumed] == shares[rank][2:]


def test_another_epoch_than_the_saved_one_begins_at_its_start() -> None:
    source = loader()
    source.load_state_dict({"epoch": 1, "batches": 3})
    source.sampler.set_epoch(2)
    assert [batch.tolist() for batch in source] == epochs(3)[2]


def test_a_distributed_sampler_resumes_too() -> None:
    def make() -> ResumableDataLoader:
        sampler = DistributedSampler(DATA, num_replicas=2, rank=1, seed=5)
        return ResumableDataLoader(DATA, batch_size=4, sampler=sampler)

    whole = [batch.tolist() for batch in make()]
    resumed = make()
    resumed.load_state_dict({"epoch": 0, "batches": 1})
    assert [batch.tolist() for batch in resumed] == whole[1:]


def test_states_and_samplers_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="after batch 6 of epoch 1, but this loader has only 6 batches"):
        loader().load_state_dict({"epoch": 1, "batches": 6})
    with pytest.raises(TypeError, match="needs a sampler with set_epoch, found SequentialSampler"):
        iter(ResumableDataLoader(DATA, sampler=SequentialSampler(DATA)))
    with pytest.raises(ValueError, match="seed=-1"):
        EpochSampler(DATA, -1)


def test_a_resumable_loader_is_a_data_loader() -> None:
    plain = DataLoader(DATA, batch_size=4, sampler=EpochSampler(DATA, 7))
    assert [batch.tolist() for batch in plain] == epochs(1, seed=7)[0]


@pytest.mark.parametrize(
    ("episodes", "fraction", "num_val"),
    [(10, 0.1, 1), (10, 0.25, 2), (10, 0.0, 0), (2, 0.01, 1), (2, 0.99, 1), (1, 0.5, 0), (5, 0.99, 4)],
)
def test_split_sizes(episodes: int, fraction: float, num_val: int) -> None:
    train, val = split_episodes(episodes, fraction, seed=0)
    assert len(val) == num_val
    assert sorted(train + val) == list(range(episodes))
    assert train == sorted(train)
    assert val == sorted(val)


def test_split_depends_on_the_seed_alone() -> None:
    assert split_episodes(50, 0.2, 3) == split_episodes(50, 0.2, 3)
    assert len({tuple(split_episodes(50, 0.2, seed)[1]) for seed in range(5)}) == 5
    for fraction in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"val_fraction={fraction} must lie in"):
            split_episodes(5, fraction, 0)
