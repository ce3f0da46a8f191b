"""The attention benchmark and the check of its tiles: floors, peers, refusal of wrong results, all on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bench import attention, attention_peers, check_attention_tiles, pi05_expert, run  # noqa: E402
from bench.attention_cases import (  # noqa: E402
    ATTENTION_CASES,
    ATTENTION_SWEEP,
    LAYOUTS,
    TINY_ATTENTION_CASES,
    draw,
    mask_of,
)
from bench.attention_cases import readable_keys as count_keys  # noqa: E402
from bench.attention_peers import ATTENTION_PEERS, AttentionPeer  # noqa: E402
from bench.check_attention_tiles import Check, checks, variants  # noqa: E402
from soma_kernels.attention.tiles import TABLE  # noqa: E402
from soma_kernels.testing import assert_close  # noqa: E402
from soma_lightning.models.pi05 import expert as expert_module  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("A", 11.3, 17.8),
        ("A2", 11.2, 12.5),
        ("B", 21.4, 42.7),
        ("B2", 21.4, 25.2),
        ("C", 13.0, 26.0),
        ("D1", 3.7, 7.4),
        ("D2", 7.6, 15.2),
        ("B64", 21.4, 42.7),
        ("E128", 11.3, 17.8),
    ],
)
def test_floors_are_those_of_the_study(name: str, forward: float, backward: float) -> None:
    """Microseconds at 4.25 TB/s and 790 TFLOP/s; the study drew other prompt lengths, within 1 %."""
    case = ATTENTION_CASES[name]
    readable = count_keys(case, mask_of(case, CPU))
    assert case.forward_floor(readable).microseconds(4.25e12) == pytest.approx(forward, rel=0.011)
    assert case.backward_floor(readable).microseconds(4.25e12) == pytest.approx(backward, rel=0.011)


def test_a_frozen_query_does_not_enter_a_frozen_context() -> None:
    case = TINY_ATTENTION_CASES["tiny_two"]
    floor = type(case)(**{**vars(case), "trains": ("k", "v")}).backward_floor(40)
    pairs = case.N * case.Hq * case.Lq * case.Lk
    assert floor.flops == 4 * 2 * case.D * pairs
    assert floor.bytes == 4 * (3 * case.N * case.Hq * case.Lq + 4 * case.N * case.Hkv * case.Lk) * case.D


def test_the_mask_is_cameras_then_a_prompt() -> None:
    mask = mask_of(ATTENTION_CASES["A"], CPU)
    assert mask is not None
    assert mask.shape == (32, 968)
    assert mask[:, :512].all()
    assert not mask[:, 512:768].any()
    assert mask[:, 768:872].all()
    assert not mask[:, 904:].any()
    assert mask_of(ATTENTION_CASES["B"], CPU) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["tiny_two", "tiny_own", "tiny_context", "grouped"])
def test_every_peer_computes_the_same(name: str, layout: Any) -> None:
    case = TINY_ATTENTION_CASES.get(name) or type(TINY_ATTENTION_CASES["tiny_two"])(
        "grouped", "", 2, 1, 4, 2, 3, 4, 20, 16, ("q", "k", "v"), masked=True, dtype=torch.float32
    )
    x, mask = draw(case, layout, CPU), mask_of(case, CPU)
    compared = 0
    for peer in ATTENTION_PEERS:
        if peer.why_absent(case, CPU) is None:
            got = attention._results(case, peer.build(case, mask), x)
            for tensor, truth in attention._truth(case, x, mask).items():
                assert_close(f"{peer.name} {tensor}", got[tensor], truth)
            compared += 1
    assert compared >= 3


def test_peers_say_why_they_are_absent_or_unlike() -> None:
    two = ATTENTION_CASES["A_T8"]
    cuda = torch.device("cuda")
    assert AttentionPeer("cudnn", True).why_absent(two, cuda) == "own keys forbid folding query rows"
    assert AttentionPeer("cudnn", True).why_absent(ATTENTION_CASES["D1"], cuda) == "nothing to fold"
    assert AttentionPeer("cudnn", True).why_absent(ATTENTION_CASES["C"], cuda) is None
    assert AttentionPeer("flash").unlike_ours(ATTENTION_CASES["A"]) == "takes no mask: wrong result"
    assert AttentionPeer("flash").unlike_ours(ATTENTION_CASES["B"]) is None
    assert len({peer.name for peer in ATTENTION_PEERS}) == len(ATTENTION_PEERS) == 13


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["attention", "--cases", "tiny_context", "--layouts", "NLHD", "--quick", "--device", "cpu"]
    assert run.main([*arguments, "--out", str(tmp_path), "--name", "lines_first", "--commit", "abc"]) == 0
    content = json.loads((tmp_path / "lines_first.json").read_text())
    assert content["environment"]["commit"] == "abc"
    assert content["implementation"] == "reference (torch)"
    (row,) = content["rows"]
    assert (row["case"], row["layout"], row["Lc"]) == ("tiny_context", "NLHD", 9)
    ours, *others = row["peers"]
    assert ours["name"] == "ours"
    assert ours["eager_both_ms"]["median"] > 0
    assert set(ours["errors"]) == {"out", "dq", "dck", "dcv"}
    assert {p["name"]: p["note"] for p in others}["sdpa cudnn fold"] == "needs a GPU"
    page = (tmp_path / "lines_first.md").read_text()
    assert "| tiny_context | NLHD |" in page
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["tiny_context", "NLHD"]


def test_a_wrong_result_gets_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = attention_peers._ours

    def wrong(x: dict[str, Tensor], *rest: Any) -> Tensor:
        return right(x, *rest) * 1.001

    monkeypatch.setattr(attention_peers, "_ours", wrong)
    arguments = ["attention", "--cases", "tiny_own", "--quick", "--device", "cpu", "--commit", "abc"]
    assert run.main([*arguments, "--out", str(tmp_path)]) == 1
    assert "wrong result, no times: tiny_own, NHLD: out: relative RMS error" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_only_the_named_peers_are_measured(tmp_path: Path) -> None:
    arguments = ["attention", "--cases", "tiny_own", "--layouts", "NHLD", "--quick", "--device", "cpu"]
    assert run.main([*arguments, "--peers", "sdpa math repeat", "--out", str(tmp_path), "--commit", "abc"]) == 0
    (row,) = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert [peer["name"] for peer in row["peers"]] == ["ours", "sdpa math repeat"]
    assert "| case | layout | ours | sdpa math repeat |" in (tmp_path / "attention.md").read_text()


def test_the_sweep_moves_one_size_at_a_time() -> None:
    assert not set(ATTENTION_SWEEP) & set(ATTENTION_CASES)
    assert len(ATTENTION_SWEEP) == 19
    sizes = ("Bc", "T", "Lq", "Lc", "D")
    for name, case in ATTENTION_SWEEP.items():
        base = ATTENTION_CASES.get(name[0], ATTENTION_SWEEP["D16"])
        changed = [size for size in sizes if getattr(case, size) != getattr(base, size)]
        assert changed in (["Bc"], ["T"], ["Lq"], ["Lc"], ["D"], ["Bc", "Lc"], []), name
        assert case.masked == base.masked


def test_large_cases_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["attention", "--cases", "A", "--device", "cpu", "--out", "nowhere"])
    assert "A on a CPU would say nothing; use --cases tiny_two,tiny_own,tiny_context" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main(["attention", "--cases", "sweep", "--device", "cpu", "--out", "nowhere"])
    assert "A_B1, A_B8, A_B128, A_L1, " in capsys.readouterr().err


# -- the check of the tiles -------------------------------------------------------------------------------------------


def test_every_entry_is_checked_in_every_variant_at_each_head_size() -> None:
    every = checks()
    assert {check.entry for check in every} == set(range(len(TABLE)))
    assert {check.dtype for check in every if TABLE[check.entry].wide} == {"float32"}
    assert {check.dtype for check in every if not TABLE[check.entry].wide} == {"bfloat16", "float16"}
    assert len(set(every)) == len(every)
    for number, entry in enumerate(TABLE):
        mine = [check for check in every if check.entry == number]
        assert {check.variant for check in mine} == set(variants(entry))
        assert {entry.heads[0] <= check.D <= entry.heads[1] for check in mine} == {True}
        for variant in variants(entry).values():
            folded = variant.T * variant.G * check_attention_tiles._num_queries(entry, variant)
            assert entry.rows[0] <= folded <= entry.rows[1]
            assert entry.listed in (None, variant.masked)
            assert entry.own is not False or not variant.own


def test_the_variants_are_what_a_kernel_can_be_asked_for() -> None:
    rows, one_pass = (
        {name: v for entry in TABLE if entry.kernel == kernel for name, v in variants(entry).items()}
        for kernel in ("rows", "one_pass")
    )
    assert {v.wanted for v in rows.values()} == {"", "q", "kv", "k", "v", "qk", "qv"}
    assert {(v.T > 1, v.G > 1) for v in rows.values()} == {(a, b) for a in (False, True) for b in (False, True)}
    assert {v.wanted for v in one_pass.values()} == {"", "KV", "K", "V", "qK", "qV"}
    assert {v.strides for v in one_pass.values()} == {"heads", "unlike", "odd"}
    assert not any(v.own or v.key_mask for v in one_pass.values())


@pytest.fixture
def small_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_attention_tiles, "DEVICE", "cpu")
    monkeypatch.setattr(check_attention_tiles, "PROGRAMS", 2)
    monkeypatch.setattr(check_attention_tiles, "_num_queries", lambda entry, variant: 3)
    monkeypatch.setattr(check_attention_tiles, "_context_lengths", lambda entry: [20])


WIDE = [(i, entry) for i, entry in enumerate(TABLE) if entry.wide and 16 in entry.heads]


@pytest.mark.usefixtures("small_checks")
@pytest.mark.parametrize(
    "check",
    [Check(i, 16, "float32", name) for i, entry in WIDE for name in variants(entry)],
    ids=lambda check: f"{TABLE[check.entry].kernel}: {check.variant}",
)
def test_a_right_tile_passes(check: Check) -> None:
    assert check_attention_tiles.run(check) is None


@pytest.mark.usefixtures("small_checks")
def test_a_wrong_tile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    number = next(i for i, entry in WIDE if entry.kernel == "rows")
    right = check_attention_tiles.run_backward

    def wrong(*args: Any, **kwargs: Any) -> Any:
        dq, *rest = right(*args, **kwargs)
        dq[0, 0, 0, 0] += 1.0
        return (dq, *rest)

    monkeypatch.setattr(check_attention_tiles, "run_backward", wrong)
    message = check_attention_tiles.run(Check(number, 16, "float32", "no mask"))
    assert message is not None
    assert message.startswith("Lq 3 Lc 20: ")
    assert "dq: relative RMS error" in message


# -- the whole expert -------------------------------------------------------------------------------------------------


def test_the_expert_runs_with_every_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--size", "tiny", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]
    assert pi05_expert.main(arguments) == 0
    content = json.loads((tmp_path / "pi05_expert.json").read_text())
    ours, *others = content["rows"]
    assert ours["name"] == "ours"
    assert ours["eager_ms"]["median"] > 0
    assert sum(row["note"] is None for row in others) == 2
    assert all(0 < row["error"] < 0.05 for row in content["rows"] if row["note"] is None)
    assert "| sdpa math fold |" in (tmp_path / "pi05_expert.md").read_text()
    assert "ours" in capsys.readouterr().out


def test_a_wrong_expert_gets_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = expert_module.attention

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = right(*args, **kwargs) * 1.1
        return out if args[0].dtype == torch.bfloat16 else out / 1.1

    monkeypatch.setattr(expert_module, "attention", wrong)
    assert pi05_expert.main(["--size", "tiny", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]) == 1
    assert "more than twice the error of torch's attention" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_expert_runs_on_the_gpu_with_graphs(tmp_path: Path) -> None:
    assert pi05_expert.main(["--size", "tiny", "--device", "cuda", "--out", str(tmp_path), "--commit", "abc"]) == 0
    rows = json.loads((tmp_path / "pi05_expert.json").read_text())["rows"]
    assert all(row["graph_ms"]["median"] > 0 for row in rows if row["note"] is None)
