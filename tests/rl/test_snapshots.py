"""Snapshots: whole or not at all, never over a slot that is read, and nobody waits."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from soma_lightning.rl.snapshots import NUM_SLOTS, Snapshot, SnapshotReader, SnapshotWriter, TornSnapshotError


def weights(version: int) -> dict[str, Tensor]:
    return {
        "matrix": torch.full((64, 33), float(version)),
        "half": torch.full((5,), float(version % 256), dtype=torch.bfloat16),
        "count": torch.tensor(version),
    }


def reader_of(writer: SnapshotWriter) -> tuple[SnapshotReader, dict[str, Tensor]]:
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
    assert writer.layout is not None
    return SnapshotReader([slot.memory for slot in writer.slots], writer.layout, targets), targets


def published(version: int = 0) -> SnapshotWriter:
    writer = SnapshotWriter()
    assert writer.publish(version, weights(version))
    return writer


def leased(writer: SnapshotWriter, reader: str) -> Snapshot:
    snapshot = writer.lease(reader)
    assert snapshot is not None
    return snapshot


def test_weights_come_through_in_place():
    writer = published(9)
    reader, targets = reader_of(writer)
    addresses = {name: tensor.data_ptr() for name, tensor in targets.items()}
    assert reader.put_in_place() == -1
    reader.stage(leased(writer, "a"))
    assert not targets["matrix"].any(), "nothing changes before the boundary of a fragment"
    assert reader.put_in_place() == 9
    assert all(torch.equal(targets[name], tensor) for name, tensor in weights(9).items())
    assert {name: tensor.data_ptr() for name, tensor in targets.items()} == addresses


def test_a_newer_staged_version_replaces_one_that_was_never_in_place():
    writer = published(1)
    reader, targets = reader_of(writer)
    for version in (1, 2, 3):
        writer.publish(version, weights(version))
        reader.stage(leased(writer, "a"))
        writer.release("a")
    assert reader.put_in_place() == 3
    assert targets["count"] == 3


def test_a_torn_snapshot_is_never_seen():
    """10^4 versions while a reader stages and puts in place as fast as it can."""
    writer = published(0)
    reader, targets = reader_of(writer)
    done, seen, faults = threading.Event(), [], []

    def read() -> None:
        try:
            while not done.is_set():
                snapshot = leased(writer, "a")
                reader.stage(snapshot)
                writer.release("a")
                version = reader.put_in_place()
                assert version == snapshot.version
                assert all(torch.equal(targets[name], tensor) for name, tensor in weights(version).items())
                seen.append(version)
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=read)
    thread.start()
    versions = [version for version in range(1, 10_001) if writer.publish(version, weights(version))]
    done.set()
    thread.join(30)
    assert not faults
    assert seen == sorted(seen)
    assert len(set(seen)) > 100
    assert len(versions) == 10_000, "one reader leaves two slots"


@pytest.mark.parametrize("damage", ["element", "version"])
def test_what_differs_from_the_checksums_is_refused(damage: str):
    writer = published(4)
    reader, targets = reader_of(writer)
    snapshot = leased(writer, "a")
    memory = writer.slots[snapshot.slot].memory
    if damage == "version":
        memory[:8].view(torch.int64).fill_(5)
    else:
        memory[writer.layout.fields[1].offset] ^= 1  # type: ignore[union-attr]
    with pytest.raises(TornSnapshotError, match=r"half" if damage == "element" else r"holds version 5"):
        reader.stage(snapshot)
    assert reader.put_in_place() == -1
    assert not targets["matrix"].any()


def test_a_leased_slot_is_never_written_and_publish_never_waits():
    writer = SnapshotWriter()
    held: dict[str, Snapshot] = {}
    for version in range(NUM_SLOTS):
        assert writer.publish(version, weights(version))
        held[str(version)] = leased(writer, str(version))
    assert {snapshot.slot for snapshot in held.values()} == set(range(NUM_SLOTS))
    assert not writer.publish(NUM_SLOTS, weights(NUM_SLOTS))
    assert leased(writer, "another").version == NUM_SLOTS - 1
    for snapshot in held.values():
        reader, targets = reader_of(writer)
        reader.stage(snapshot)
        reader.put_in_place()
        assert targets["count"] == snapshot.version
    writer.release("0")  # its process died; the engine says so
    assert writer.publish(NUM_SLOTS, weights(NUM_SLOTS))
    assert leased(writer, "0").version == NUM_SLOTS


def test_the_current_slot_is_kept_while_another_one_is_free():
    writer = published(0)
    for version in range(1, 20):
        before = writer.current
        writer.publish(version, weights(version))
        assert before is not None
        assert writer.current is not None
        assert writer.current.slot != before.slot


def test_a_reader_holds_one_lease():
    writer = published()
    leased(writer, "a")
    with pytest.raises(ValueError, match="holds a lease already"):
        writer.lease("a")


def test_tensors_that_do_not_fit_are_named_in_one_error():
    writer = published()
    other = {**weights(1), "half": torch.zeros(5), "extra": torch.zeros(1)}
    del other["count"]
    message = r"missing \['count'\], unexpected \['extra'\].*half is float32 \[5\], the collector has bfloat16 \[5\]"
    with pytest.raises(ValueError, match=message):
        writer.publish(1, other)
    with pytest.raises(ValueError, match=r"missing \['extra'\]"):
        SnapshotReader([slot.memory for slot in writer.slots], writer.layout, {**weights(0), "extra": torch.zeros(1)})


def test_a_snapshot_without_tensors_is_only_a_version():
    writer = SnapshotWriter()
    writer.publish(3, {})
    reader = SnapshotReader([slot.memory for slot in writer.slots], writer.layout, {})
    reader.stage(leased(writer, "a"))
    assert reader.put_in_place() == 3
