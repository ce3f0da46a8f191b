"""Pass 1 of the optimizer step (`soma_kernels.optim.grad_stats`) against float64, whatever the gradients look like."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from soma_kernels.optim import plan
from soma_kernels.optim import reference as reference_pass
from soma_kernels.optim.plan import EMPTY_GRADIENT, SMALL_TENSORS, StepTable, Tiles, Variant, WorkList, tiles_for
from soma_kernels.optim.reference import GradStats

pytest.importorskip("triton")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Offsets in elements of a gradient in a flat buffer; only the first is a multiple of 16 bytes.
OFFSETS = (0, 1, 3, 7)


def addresses_of(grads: Sequence[Tensor | None]) -> np.ndarray:
    rows = [0 if g is None else g.data_ptr() if g.numel() else EMPTY_GRADIENT for g in grads]
    return np.array(rows, dtype=np.int64)


def work_for(grads: Sequence[Tensor], tiles: Tiles | None, **settings: object) -> WorkList:
    variants = [Variant(torch.float32, g.dtype, torch.float32, False) for g in grads]
    return WorkList.build([g.numel() for g in grads], variants, grads[0].device, tiles=tiles, **settings)  # type: ignore[arg-type]


def stats_of(
    grads: Sequence[Tensor], tiles: Tiles | None, *, norm_type: float = 2.0, **settings: object
) -> tuple[WorkList, GradStats]:
    from soma_kernels.optim.grad_stats import grad_stats

    work = work_for(grads, tiles, **settings)
    table = StepTable(work)
    table.write(addresses_of(grads))
    return work, grad_stats(work, table, norm_type=norm_type)


def sizes_around(tile: int, chunk: int) -> list[int]:
    """Every way in which a tensor can end: inside a tile, on its edge, on a chunk's edge, past it."""
    return [1, 0, tile - 1, tile, tile + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + tile + 5]


def at_offset(values: Tensor, offset: int) -> Tensor:
    """The same values at an element offset of a larger buffer, with NaN around them that must not be read."""
    buffer = torch.full((offset + values.numel() + 16,), math.nan, dtype=values.dtype, device=values.device)
    view = buffer[offset : offset + values.numel()]
    return view.copy_(values)


def random(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


def truth(grads: Sequence[Tensor], norm_type: float) -> float:
    flat = torch.cat([g.double().flatten() for g in grads])
    return flat.square().sum().item() if norm_type == 2.0 else flat.abs().max().item()


# ---------------------------------------------------------------------- values


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_right_for_every_size_and_alignment(
    device: torch.device, tiles: Tiles, dtype: torch.dtype, norm_type: float
) -> None:
    sizes = sizes_around(tiles.stats_tile, tiles.stats_chunk)
    values = random(sizes, dtype, device)
    results = []
    for offset in OFFSETS:
        grads = [at_offset(v, offset) for v in values]
        copies = [g.clone() for g in grads]
        work, stats = stats_of(grads, tiles, norm_type=norm_type)
        assert stats.vector.dtype == stats.partials.dtype == torch.float32
        assert stats.partials.numel() == work.stats.count == sum(-(-size // tiles.stats_chunk) for size in sizes)
        assert stats.vector[:2].tolist() == [0.0, 1.0]
        assert stats.vector[2].item() == pytest.approx(truth(grads, norm_type), rel=1e-6 if norm_type == 2.0 else 0)
        for partial, tensor in zip(stats.partials.tolist(), work.stats.tensor_on_host, strict=True):
            assert 0 < partial <= truth([grads[tensor]], norm_type) * (1 + 1e-6)
        assert all(torch.equal(a, b) for a, b in zip(grads, copies, strict=True))
        results.append(stats)
    for stats in results[1:]:  # the address of a gradient changes no bit
        assert torch.equal(stats.partials, results[0].partials)
        assert torch.equal(stats.vector, results[0].vector)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_dtypes_mix_in_one_call_and_each_tensor_keeps_its_partials(
    device: torch.device, tiles: Tiles, norm_type: float
) -> None:
    sizes = [tiles.stats_chunk + 3, 5, 2 * tiles.stats_chunk, 40]
    dtypes = [*DTYPES, torch.float32]
    grads = [
        (10.0**i * torch.rand(size, device=device)).to(dtype)
        for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    ]
    work, stats = stats_of(grads, tiles, norm_type=norm_type)
    assert len(work.stats.launches) == 3, "tensors of one dtype share a launch"
    assert stats.vector[2].item() == pytest.approx(truth(grads, norm_type), rel=1e-6)
    for i, grad in enumerate(grads):
        rows = stats.partials[torch.from_numpy(work.stats.tensor_on_host == i).to(device)].double()
        combined = rows.sum() if norm_type == 2.0 else rows.max()
        assert combined.item() == pytest.approx(truth([grad], norm_type), rel=1e-6)


def test_squares_are_summed_in_fp32_whatever_the_dtype(device: torch.device, tiles: Tiles) -> None:
    """A sum in bf16 stops growing after 256 equal elements; squares of fp16 overflow beyond 255."""
    for dtype, value in ((torch.bfloat16, 1.0), (torch.float16, 300.0)):
        grad = torch.full((5000,), value, dtype=dtype, device=device)
        _, stats = stats_of([grad], Tiles(stats_chunk=4096, stats_tile=1024))
        assert stats.vector.tolist() == [0.0, 1.0, 5000 * value**2]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_two_runs_have_the_same_bits(device: torch.device, tiles: Tiles, norm_type: float) -> None:
    grads = random([3 * tiles.stats_chunk + 17, tiles.stats_tile + 1], torch.float32, device)
    runs = [stats_of(grads, tiles, norm_type=norm_type)[1] for _ in range(3)]
    for run in runs[1:]:
        assert torch.equal(run.partials, runs[0].partials)
        assert torch.equal(run.vector, runs[0].vector)


def test_the_sum_of_many_chunks_is_taken_in_double_precision(device: torch.device) -> None:
    """The combining program walks the partials in blocks; ones beside 2**26 vanish in an fp32 sum."""
    from soma_kernels.launch import Prepared
    from soma_kernels.optim.grad_stats import _COMBINE_BLOCK, _combine_kernel

    count = 2 * _COMBINE_BLOCK + 77
    partials = torch.ones(count, device=device)
    partials[::4097] = 2.0**26
    clip_of_chunk = torch.zeros(count, dtype=torch.int32, device=device)
    clip_of_chunk[5::7] = 1
    clip_of_chunk[6::7] = -1
    for inf, nonfinite in itertools.product((False, True), (0, 3)):
        data = partials.clone()
        data[6 : 6 + 7 * nonfinite : 7] = math.nan  # in chunks whose squares do not count here
        vector = torch.full((4,), -1.0, device=device)
        combine = Prepared(_combine_kernel, (inf, _COMBINE_BLOCK), num_warps=8)
        combine(2, data, clip_of_chunk, vector, count)
        for clip in (0, 1):
            members = partials[clip_of_chunk == clip].double()
            assert vector[2 + clip].item() == (members.max() if inf else members.sum()).float().item()
        assert vector[:2].tolist() == [nonfinite, 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_large_gradient_has_many_chunks(norm_type: float) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    grads = random([50_000_001, 12_345_678], torch.bfloat16, torch.device("cuda"))
    tiles = Tiles(stats_chunk=4096)
    work, stats = stats_of(grads, tiles, norm_type=norm_type)
    assert work.stats.count > 3 * 4096
    assert stats.vector[2].item() == pytest.approx(truth(grads, norm_type), rel=1e-6)


# ---------------------------------------------------------------------- clip groups and ownership


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clip_groups_have_their_own_sums_and_uncounted_tensors_none(
    device: torch.device, tiles: Tiles, norm_type: float
) -> None:
    grads = [
        scale * g
        for scale, g in zip((1, 2, 30, 4, 500), random([300, 7, 64, 129, 9], torch.float32, device), strict=True)
    ]
    clips, counted = [0, 2, 1, 2, 0], [True, True, False, True, False]
    _, everything = stats_of(grads, tiles, norm_type=norm_type, clips=clips, num_clips=4)
    _, owned = stats_of(grads, tiles, norm_type=norm_type, clips=clips, num_clips=4, counted=counted)
    for clip in range(4):
        for stats, use in ((everything, [True] * 5), (owned, counted)):
            members = [g for g, c, u in zip(grads, clips, use, strict=True) if c == clip and u]
            expected = truth(members, norm_type) if members else 0.0
            assert stats.groups[clip].item() == pytest.approx(expected, rel=1e-6)
    reference = reference_pass.grad_stats(grads, norm_type=norm_type, clips=clips, num_clips=4, counted=counted)
    torch.testing.assert_close(owned.vector, reference.vector, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_nonfinite_value_counts_where_its_squares_do_not(
    device: torch.device, tiles: Tiles, norm_type: float
) -> None:
    grads = random([10, 20], torch.float32, device)
    grads[1][4] = math.nan
    _, stats = stats_of(grads, tiles, norm_type=norm_type, counted=[True, False])
    assert stats.nonfinite.item() == 1
    assert stats.total.item() == pytest.approx(truth(grads[:1], norm_type), rel=1e-6)


# ---------------------------------------------------------------------- empty and absent gradients


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_nothing_to_read_is_a_norm_of_zero(device: torch.device, tiles: Tiles, norm_type: float) -> None:
    work, stats = stats_of(
        [torch.zeros(0, 4, device=device), torch.zeros(0, device=device)], tiles, norm_type=norm_type
    )
    assert work.stats.launches == work.update.launches == ()
    assert stats.vector.tolist() == [0.0, 1.0, 0.0]
    assert stats.partials.numel() == 0


@pytest.mark.usefixtures("unwritten_is_nan")
def test_a_tensor_without_gradient_adds_nothing(device: torch.device, tiles: Tiles) -> None:
    from soma_kernels.optim.grad_stats import grad_stats

    grads = random([100, 300, 50], torch.bfloat16, device)
    work = work_for(grads, tiles)
    table = StepTable(work)
    table.write(addresses_of([grads[0], None, grads[2]]))
    stats = grad_stats(work, table)
    assert stats.total.item() == pytest.approx(truth([grads[0], grads[2]], 2.0), rel=1e-6)
    assert stats.nonfinite.item() == 0
    table.write(addresses_of([None, None, None]))
    assert grad_stats(work, table).vector.tolist() == [0.0, 1.0, 0.0]


# ---------------------------------------------------------------------- non-finite values


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nonfinite_value_is_found_wherever_it_is(
    device: torch.device, tiles: Tiles, dtype: torch.dtype, offset: int, norm_type: float
) -> None:
    from soma_kernels.optim.grad_stats import tensor_of_first_nonfinite

    chunk, tile = tiles.stats_chunk, tiles.stats_tile
    size = chunk + tile + 5
    grads = [at_offset(torch.ones(n, dtype=dtype, device=device), offset) for n in (3, size, 4)]
    # first element, last of a tile, first of the next, last of a chunk, first of the next, tail tile, last element
    for at, value in zip(
        [0, tile - 1, tile, chunk - 1, chunk, chunk + tile + 2, size - 1],
        itertools.cycle((math.nan, math.inf, -math.inf)),
        strict=False,
    ):
        grads[1][at] = value
        work, stats = stats_of(grads, tiles, norm_type=norm_type)
        assert stats.nonfinite.item() == 1, (at, value)
        assert not stats.total.isfinite()
        assert tensor_of_first_nonfinite(work, stats.partials) == 1
        grads[1][at] = 1.0
    work, stats = stats_of(grads, tiles, norm_type=norm_type)
    assert stats.nonfinite.item() == 0
    assert tensor_of_first_nonfinite(work, stats.partials) is None


def test_the_first_of_several_bad_tensors_is_named_whatever_the_launch_order(
    device: torch.device, tiles: Tiles
) -> None:
    from soma_kernels.optim.grad_stats import tensor_of_first_nonfinite

    grads = [
        torch.ones(tiles.stats_chunk + 1, device=device).to(d) for d in (DTYPES[0], DTYPES[0], DTYPES[2], DTYPES[1])
    ]
    for i in (3, 2, 1):  # launches are sorted by dtype: bf16 runs before fp16 and fp32
        grads[i][-1] = math.nan
        work, stats = stats_of(grads, tiles)
        assert tensor_of_first_nonfinite(work, stats.partials) == i
        assert stats.nonfinite.item() == 4 - i


def test_squares_that_overflow_are_not_finite_and_their_maximum_is(device: torch.device, tiles: Tiles) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        grad = torch.ones(10, dtype=dtype, device=device)
        grad[3] = -3e38
        _, stats = stats_of([grad], tiles)
        assert stats.vector.tolist() == [1.0, 1.0, math.inf]
        _, stats = stats_of([grad], tiles, norm_type=math.inf)
        assert stats.vector.tolist() == [0.0, 1.0, grad.abs().max().item()]


def test_a_sum_that_overflows_only_over_chunks_is_infinite(device: torch.device, tiles: Tiles) -> None:
    grad = torch.zeros(4 * tiles.stats_chunk, device=device)
    grad[:: tiles.stats_chunk] = 1.5e19  # each square is finite, their sum is not
    _, stats = stats_of([grad], tiles)
    assert stats.partials.isfinite().all()
    assert stats.vector.tolist() == [0.0, 1.0, math.inf]


# ---------------------------------------------------------------------- the work list


def test_chunks_cover_every_tensor_once() -> None:
    variants = [Variant(torch.float32, d, torch.float32, False) for d in (DTYPES[0], DTYPES[1], DTYPES[0], DTYPES[1])]
    sizes = [300, 0, 256, 1]
    work = WorkList.build(sizes, variants, torch.device("cpu"), tiles=Tiles(stats_chunk=256, update_chunk=128))
    for chunks, size in ((work.stats, 256), (work.update, 128)):
        counts = [-(-n // size) for n in sizes]
        assert chunks.count == sum(counts)
        for tensor, count in enumerate(counts):
            rows = np.flatnonzero(chunks.tensor_on_host == tensor).tolist()
            first = int(chunks.first[tensor])
            assert rows == list(range(first, first + count))
        assert chunks.tensor.tolist() == chunks.tensor_on_host.tolist()
        covered = [row for launch in chunks.launches for row in range(launch.first, launch.first + launch.programs)]
        assert covered == list(range(chunks.count))
        for launch in chunks.launches:
            rows = chunks.tensor_on_host[launch.first : launch.first + launch.programs]
            assert {variants[i] for i in rows} == {launch.variant}


def test_tiles_depend_on_sizes_alone() -> None:
    assert tiles_for([plan.SMALL_MEAN] * 3) == Tiles()
    assert tiles_for([plan.SMALL_MEAN - 1] * 3) == SMALL_TENSORS
    assert tiles_for([0, 4 * plan.SMALL_MEAN]) == Tiles()


@pytest.mark.parametrize("tiles_", [Tiles(), SMALL_TENSORS])
def test_tiles_keep_their_promises(tiles_: Tiles) -> None:
    for chunk, tile in ((tiles_.stats_chunk, tiles_.stats_tile), (tiles_.update_chunk, tiles_.update_tile)):
        assert chunk % tile == 0
        assert tile & (tile - 1) == 0
        assert tile >= 16
