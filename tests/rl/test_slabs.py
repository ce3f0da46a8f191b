"""Slabs: what was packed is read by another mapping, within the bound of bytes, and nothing is lost while waiting."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from soma_lightning.rl.blocks import ALIGNMENT, Block, lay_out, receive_block, views
from soma_lightning.rl.slabs import SlabPool

sys.path.insert(0, str(Path(__file__).parent))  # as rollout processes import it
import collectors  # type: ignore[import-not-found]  # noqa: E402

KIB = 1024


def fragment(num_bytes: int) -> dict[str, torch.Tensor]:
    return {"payload": torch.zeros(num_bytes, dtype=torch.uint8)}


def test_every_kind_of_tensor_comes_back_from_another_mapping():
    tensors = {
        "fp32": torch.randn(3, 5),
        "bf16": torch.randn(7).bfloat16(),
        "long": torch.tensor(2**60 + 1),
        "flags": torch.tensor([True, False, True]),
        "turned": torch.arange(6, dtype=torch.float64).view(2, 3).T,
        "empty": torch.zeros(0, 4, dtype=torch.int32),
    }
    blocks: dict[int, Block] = {}
    pool = SlabPool(64 * KIB, announce=blocks.__setitem__)
    packed = pool.pack(tensors, time.perf_counter)
    ours, theirs = multiprocessing.Pipe()
    blocks[packed.slab].send(ours)
    memory = receive_block(theirs)
    assert memory.data_ptr() != blocks[packed.slab].memory.data_ptr()
    found = views(memory, packed.layout)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
        assert (found[name].data_ptr() - memory.data_ptr()) % ALIGNMENT == 0
    found["fp32"].fill_(7.0)  # no copy: what one mapping writes the other one shows
    assert views(blocks[packed.slab].memory, packed.layout)["fp32"].eq(7.0).all()


def test_blocks_have_no_name_and_leave_no_descriptor():
    descriptors = len(os.listdir("/proc/self/fd"))
    ours, theirs = multiprocessing.Pipe()
    blocks = [Block(KIB) for _ in range(5)]
    for block in blocks:
        block.send(ours)
    received = [receive_block(theirs) for _ in blocks]
    assert not collectors.named_memory()
    del blocks, block, received, ours, theirs
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_free_slab_is_used_again_and_its_handle_travels_once():
    announced: list[int] = []
    pool = SlabPool(64 * KIB, announce=lambda slab, block: announced.append(slab))
    for _ in range(5):
        pool.release(pool.pack(fragment(10 * KIB), time.perf_counter).slab)
    assert announced == [0]
    assert pool.num_bytes == 10 * KIB
    assert pool.bytes_leased == 0


def test_the_smallest_free_slab_that_is_large_enough_is_taken():
    pool = SlabPool(64 * KIB)
    slabs = [pool.pack(fragment(size * KIB), time.perf_counter).slab for size in (30, 10, 20)]
    for slab in slabs:
        pool.release(slab)
    assert pool.pack(fragment(9 * KIB), time.perf_counter).slab == slabs[1]
    assert pool.pack(fragment(9 * KIB), time.perf_counter).slab == slabs[2]


def test_a_slab_that_is_too_small_gives_way_to_a_larger_one_within_the_bound():
    retired: list[int] = []
    pool = SlabPool(32 * KIB, retire=retired.append)
    small = [pool.pack(fragment(8 * KIB), time.perf_counter).slab for _ in range(3)]
    for slab in small[:2]:
        pool.release(slab)
    pool.pack(fragment(20 * KIB), time.perf_counter)
    assert sorted(retired) == small[:2]
    assert pool.num_bytes == 28 * KIB


def test_a_fragment_that_can_never_fit_names_both_sizes_and_the_setting():
    with pytest.raises(ValueError, match=r"fragment of 20,480 bytes .* arena_bytes=10,240"):
        SlabPool(10 * KIB).pack(fragment(20 * KIB), time.perf_counter)


@pytest.mark.parametrize("slab", [0, 5])
def test_only_a_leased_slab_can_be_released(slab: int):
    pool = SlabPool(64 * KIB)
    pool.release(pool.pack(fragment(KIB), time.perf_counter).slab)
    with pytest.raises(ValueError, match="not leased"):
        pool.release(slab)


def test_a_fast_producer_waits_and_never_exceeds_the_bound():
    packed: list[tuple[int, int]] = []
    waits: list[int] = []
    ready = threading.Semaphore(0)
    pool = SlabPool(40 * KIB, when_full=waits.append)

    def produce() -> None:
        for number in range(200):
            size = (1 + number % 10) * KIB
            found = pool.pack({"n": torch.full((size,), number % 256, dtype=torch.uint8)}, time.perf_counter)
            assert pool.num_bytes <= pool.arena_bytes
            packed.append((found.slab, number))
            ready.release()

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    for number in range(200):
        assert ready.acquire(timeout=30)
        assert pool.bytes_leased <= pool.arena_bytes
        slab, found = packed[number]
        assert found == number
        assert pool._slabs[slab].memory[0] == number % 256
        time.sleep(0.0005)
        pool.release(slab)
    producer.join(30)
    assert waits, "the producer was meant to be the faster one"


def test_layouts_do_not_overlap_and_begin_where_asked():
    layout = lay_out({"a": torch.zeros(3), "b": torch.zeros(65, dtype=torch.uint8), "c": torch.zeros(())}, begin=64)
    assert [field.offset for field in layout.fields] == [64, 128, 256]
    assert layout.num_bytes == 320
