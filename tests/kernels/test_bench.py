"""The benchmark itself: what it counts, that it refuses wrong results, and that its commands run, all on a CPU."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bench import lightning_loop, report, run
from bench.gate import HYPER, NORMS, Float64AdamW, Verdict, WrongResultError, check
from bench.optim import PeerResult, Row
from bench.optim_page import page, short_table
from bench.peers import PEERS, Hyper, Ours, Peer, TorchAdamW
from bench.registry import CASES, SETS, TINY_SETS, Case, ParameterSet, Slot, select, shard_set
from bench.timing import Budget, Timing, time_on_device, time_on_host
from bench.trace import END, GRADIENTS, START, step_profile
from bench.workload import Workload
from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.model import PI05Model

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


# -- registry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("pi05_expert", 208, 430_098_464),
        ("groot_head", 448, 1_082_671_104),
        ("molmoact2_expert", 588, 577_564_448),
        ("many_small", 6000, 4000 * 257 + 2000 * 64 * 65),
    ],
)
def test_sets_have_the_counts_of_their_models(name: str, tensors: int, parameters: int) -> None:
    assert (SETS[name].tensors, SETS[name].parameters) == (tensors, parameters)


def test_pi05_expert_holds_the_shapes_that_expert_training_trains() -> None:
    with torch.device("meta"):
        model = PI05Model(PI05Config.base())
    trained = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    assert list(SETS["pi05_expert"].shapes) == trained


def test_the_shards_of_all_ranks_are_the_7b_model() -> None:
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096 + 1
    whole = 2 * 32001 * 4096 + 32 * layer + 4096 + 7 * 4096 + 7 + 4096 + 1
    assert whole == pytest.approx(6.74e9, rel=1e-3)
    last = SETS["shards_7b"]
    assert last.tensors == 1 + 32 * 10 + 6
    # Rank 7 holds its eighth of what divides, the short end of both vocabularies and nothing of gates and small heads.
    rows = 32001 - 7 * 4001
    assert last.parameters == 2 * rows * 4096 + 32 * (layer - 1) // 8 + 4096 // 8
    assert last.shapes.count((0,)) == 34
    assert last.shapes.count((0, 4096)) == 2


@pytest.mark.parametrize("rank", range(4))
def test_shards_follow_torch_chunk_and_padded_offsets(rank: int) -> None:
    units: list[list[tuple[int, ...]]] = [[(1,), (10, 3), (4,)], [(2, 5)]]
    shards = shard_set("s", "", units, ranks=4, rank=rank)
    for shape, full in zip(shards.shapes, [s for unit in units for s in unit], strict=True):
        pieces = torch.empty(full).chunk(4)
        expected = tuple(pieces[rank].shape) if rank < len(pieces) else (0, *full[1:])
        assert shape == expected
    # One padded row of (1,), three rows of (10, 3), one of (4,); then the second unit's own buffer.
    assert shards.slots == (Slot(0, 0), Slot(0, 1), Slot(0, 10), Slot(1, 0))
    assert shards.buffers == (11, 5)


@pytest.mark.parametrize(
    ("name", "norm", "read", "written"),
    [
        ("fp32", 4, 4 + 4 + 4 + 4, 4 + 4 + 4),
        ("bf16_state32", 2, 2 + 2 + 4 + 4, 2 + 4 + 4),
        ("bf16_master", 2, 2 + 4 + 4 + 4, 2 + 4 + 4 + 4),
        ("bf16", 2, 2 + 2 + 2 + 2, 2 + 2 + 2),
        ("fp16_state32", 2, 2 + 2 + 4 + 4, 2 + 4 + 4),
        ("fp16_master", 2, 2 + 4 + 4 + 4, 2 + 4 + 4 + 4),
    ],
)
def test_floors_by_hand(name: str, norm: int, read: int, written: int) -> None:
    assert CASES[name].floor_bytes_per_element() == norm + read + written


def test_every_case_has_a_floor_test() -> None:
    assert set(CASES) == {"fp32", "bf16_state32", "bf16_master", "bf16", "fp16_state32", "fp16_master"}


def test_select() -> None:
    assert [c.name for c in select("case", "bf16, fp32", CASES, CASES)] == ["bf16", "fp32"]
    assert [s.name for s in select("set", "all", {**SETS, **TINY_SETS}, SETS)] == list(SETS)
    with pytest.raises(ValueError, match=r"unknown case fp8; valid: all, fp32, bf16_state32"):
        select("case", "fp32,fp8", CASES, CASES)
    with pytest.raises(ValueError, match=r"unknown case ''"):
        select("case", "", CASES, CASES)
    with pytest.raises(ValueError, match="a case is given twice in 'fp32,fp32'"):
        select("case", "fp32,fp32", CASES, CASES)


# -- workload ---------------------------------------------------------------------------------------------------------


def test_gradients_of_shards_are_unaligned_views_of_flat_buffers() -> None:
    work = Workload(TINY_SETS["tiny_shards"], CASES["fp32"], CPU)
    for views in work.gradients:
        for view, slot in zip(views, work.set.slots or (), strict=True):
            assert view.storage_offset() == slot.offset
            assert view.is_contiguous()
        layer = views[1:11]
        assert len({v.untyped_storage().data_ptr() for v in layer}) == 1
        assert any(v.data_ptr() % 16 for v in layer if v.numel())


def test_gradient_sets_do_not_share_memory_and_take_turns() -> None:
    work = Workload(TINY_SETS["tiny_dense"], CASES["bf16"], CPU)
    first, second = ({g.data_ptr() for g in views if g.numel()} for views in work.gradients)
    assert not first & second
    work.assign(1)
    assert all(p.grad is g for p, g in zip(work.params, work.gradients[1], strict=True))
    assert all(p.dtype == torch.bfloat16 for p in work.params)


# -- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("parameter_set", TINY_SETS.values(), ids=list(TINY_SETS))
def test_the_gate_lets_the_real_step_pass(parameter_set: ParameterSet, case: Case) -> None:
    verdict = check(parameter_set, case, CPU)
    quantities = {"parameter", "exp_avg", "exp_avg_sq"} | ({"master"} if case.master else set())
    assert set(verdict.errors) == quantities
    assert all(0 <= ours < 1e-2 for ours, _ in verdict.errors.values())


class WithoutClipping(Ours):
    def step(self) -> None:
        self.optimizer.step()


class WrongNorm(Ours):
    def step(self) -> None:
        super().step()
        self.optimizer.last_grad_norm.mul_(1 + 1e-5)


class WrongBeta(Ours):
    def __init__(self, params: Sequence[Parameter], case: Case, hyper: Hyper) -> None:
        super().__init__(params, case, hyper)
        self.optimizer.param_groups[0]["betas"] = (hyper.beta1, hyper.beta2 * 0.999)


class SpoiledAtTheEnd(Ours):
    """Right until something is done after the last step."""

    def step(self) -> None:
        super().step()
        params = self.optimizer.param_groups[0]["params"]
        if self.optimizer.state[params[0]]["step"] == len(NORMS):
            with torch.no_grad():
                self.spoil(params)

    def spoil(self, params: list[Parameter]) -> None:
        raise NotImplementedError


class WritesGradient(SpoiledAtTheEnd):
    def spoil(self, params: list[Parameter]) -> None:
        assert params[-1].grad is not None
        params[-1].grad.neg_()


class WrongElement(SpoiledAtTheEnd):
    """One element of 8,385 is off by half its tensor's RMS: nothing that a mean in bf16 can show."""

    def spoil(self, params: list[Parameter]) -> None:
        moments = self.optimizer.state[params[4]]["exp_avg_sq"]
        moments[-1, -1] += 0.5 * moments.float().square().mean().sqrt()


class WrongSmallTensor(SpoiledAtTheEnd):
    """48 of 9,971 elements are off by 3 %: too few for the error over the set."""

    def spoil(self, params: list[Parameter]) -> None:
        self.optimizer.state[params[1]]["exp_avg"].mul_(1.03)


class StaleMaster(SpoiledAtTheEnd):
    def spoil(self, params: list[Parameter]) -> None:
        params[0][0, 0] *= 1 + 2**-7


class WrongCounter(SpoiledAtTheEnd):
    def spoil(self, params: list[Parameter]) -> None:
        self.optimizer.state[params[1]]["step"].sub_(1)


class NotANumber(SpoiledAtTheEnd):
    def spoil(self, params: list[Parameter]) -> None:
        params[0][1, 1] = math.nan


@pytest.mark.parametrize(
    ("wrong", "case", "message"),
    [
        (WithoutClipping, "fp32", "parameter: relative RMS error"),
        (WrongNorm, "fp32", r"the norm of step 1 is 2\.\d+, float64 has 2\.\d+"),
        (WrongBeta, "bf16_master", "exp_avg_sq: relative RMS error"),
        (WritesGradient, "bf16", "step 3 wrote into a gradient"),
        (WrongElement, "bf16", r"exp_avg_sq of tensor 4, shape \(129, 65\): largest error of one element"),
        (
            WrongSmallTensor,
            "bf16",
            r"exp_avg of tensor 1, shape \(48,\): relative RMS error .*; 1 of 5 tensors are off",
        ),
        (StaleMaster, "bf16_master", "a parameter is not its master, rounded"),
        (WrongCounter, "fp32", "a step counter is not 3 after 3 steps"),
        (NotANumber, "fp32", "parameter: relative RMS error nan"),
    ],
)
def test_the_gate_refuses(wrong: type[Ours], case: str, message: str) -> None:
    with pytest.raises(WrongResultError, match=rf"^tiny_dense, {case}: .*{message}"):
        check(TINY_SETS["tiny_dense"], CASES[case], CPU, wrong)


def test_the_gates_truth_is_torchs_adamw_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(7, 3, generator=generator), torch.empty(0, 3), torch.randn(5, generator=generator)]
    truth = Float64AdamW(params, HYPER)
    theirs = [Parameter(p.double()) for p in params]
    stock = torch.optim.AdamW(theirs, HYPER.lr, (HYPER.beta1, HYPER.beta2), HYPER.eps, HYPER.weight_decay)
    for _ in NORMS:
        grads = [torch.randn(p.shape, generator=generator) for p in params]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.double()
        norm = torch.nn.utils.clip_grad_norm_(theirs, HYPER.max_norm)
        stock.step()
        assert truth.step(grads) == pytest.approx(norm.item(), rel=1e-14)
    flat = torch.cat([p.detach().reshape(-1) for p in theirs])
    torch.testing.assert_close(truth.param, flat, rtol=1e-14, atol=1e-14)


# -- peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("rounded", [False, True])
def test_torch_with_fp32_copies_is_an_fp32_run(kind: Any, rounded: bool) -> None:
    work = Workload(TINY_SETS["tiny_dense"], CASES["bf16_master"], CPU)
    full = [Parameter(p.detach().float()) for p in work.params]
    stock = torch.optim.AdamW(full, 1e-4, (0.9, 0.95), 1e-8, 0.01, fused=kind == "fused", foreach=kind == "foreach")
    peer = TorchAdamW(work.params, Hyper(), kind, fp32_targets=True, rounded=rounded)
    for index in (0, 1):
        work.assign(index)
        for p, g in zip(full, work.gradients[index], strict=True):
            p.grad = g.float()
        torch.nn.utils.clip_grad_norm_(full, 1.0, foreach=kind != "for-loop")
        stock.step()
        peer.step()
        if rounded:
            for p in full:
                p.data.copy_(p.detach().bfloat16())
    for low, target, p in zip(work.params, peer.targets, full, strict=True):
        assert torch.equal(target, p.detach())
        assert torch.equal(low.detach(), p.detach().bfloat16())


def test_libraries_are_asked_for_only_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    apex = next(peer for peer in PEERS if peer.name == "apex")
    monkeypatch.setattr("bench.peers.find_spec", lambda name: None)
    assert apex.why_absent(CASES["fp32"]) == "not installed"
    assert Peer("torch fused").why_absent(CASES["fp32"]) is None
    monkeypatch.setattr("bench.peers.find_spec", lambda name: object())
    assert apex.why_absent(CASES["fp32"]) is None


@pytest.mark.parametrize("name", ["apex", "bitsandbytes"])
def test_libraries_get_the_hyperparameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Recording:
        def __init__(self, params: list[Parameter], **settings: Any) -> None:
            calls.append(("init", settings))

        def step(self) -> None:
            calls.append(("step", {}))

    optimizers, clipping = ModuleType(f"{name}.optimizers"), ModuleType(f"{name}.contrib.clip_grad")
    optimizers.FusedAdam = optimizers.AdamW = Recording  # type: ignore[attr-defined]
    clipping.clip_grad_norm_ = lambda params, norm: calls.append(("clip", {"norm": norm}))  # type: ignore[attr-defined]
    modules = {"apex.optimizers": optimizers, "apex.contrib.clip_grad": clipping, "bitsandbytes.optim": optimizers}
    monkeypatch.setattr("bench.peers.import_module", modules.__getitem__)
    work = Workload(TINY_SETS["tiny_many"], CASES["bf16_master"], CPU)
    before = work.params[0].grad.norm().item()  # type: ignore[union-attr]
    peer = next(peer for peer in PEERS if peer.name == name)
    stepper = peer.build(work.params, work.case, Hyper(max_norm=1e-6), implementation="reference", captured=False)
    stepper.step()
    settings = calls[0][1]
    assert (settings["lr"], settings["betas"], settings["weight_decay"]) == (1e-4, (0.9, 0.95), 0.01)
    if name == "apex":
        assert settings["master_weights"]
        assert settings["capturable"]
        assert calls[1:] == [("clip", {"norm": 1e-6}), ("step", {})]
    else:
        assert work.params[0].grad.norm().item() < before  # type: ignore[union-attr]
        assert peer.unlike_ours(work.case) == "no masters, fewer bytes"


def test_what_torch_computes_differently_is_said() -> None:
    fused = next(peer for peer in PEERS if peer.name == "torch fused")
    assert fused.unlike_ours(CASES["bf16_state32"]) == "moments in bfloat16, fewer bytes"
    assert fused.unlike_ours(CASES["bf16_master"]) is None
    assert fused.unlike_ours(CASES["bf16"]) is None
    assert fused.why_absent(CASES["fp16_master"]) is None
    assert fused.why_absent(CASES["fp16_state32"]) == "float16 moments underflow"


# -- timing -----------------------------------------------------------------------------------------------------------


def test_quartiles_of_known_samples() -> None:
    timing = Timing((4.0, 1.0, 2.0, 3.0, 5.0))
    assert timing.median == 3.0
    assert timing.quartiles == (2.0, 4.0)
    assert Timing((7.0,)).quartiles == (7.0, 7.0)


def test_a_budget_ends_by_repeats_and_seconds_or_at_its_limit() -> None:
    budget = Budget(repeats=30, seconds=0.2, limit=1.0)
    assert budget.goes_on(29, 0.5)
    assert budget.goes_on(100, 0.1)
    assert not budget.goes_on(30, 0.2)
    assert not budget.goes_on(5, 1.0)


@pytest.mark.parametrize("timer", [time_on_device, time_on_host])
def test_each_call_is_prepared_and_warm_up_is_not_counted(timer: Any) -> None:
    log: list[str] = []
    budget = Budget(repeats=4, seconds=0.0, limit=60.0, warmup=2)
    timing = timer(lambda: log.append("step"), CPU, budget, prepare=lambda: log.append("prepare"))
    assert len(timing.samples) == 4
    assert log == ["prepare", "step"] * 6


# -- pages and the command line ---------------------------------------------------------------------------------------


def result(case: str, *, fused_note: str | None) -> Row:
    peers = [PeerResult(peer.name, "not installed") for peer in PEERS]
    ours = PeerResult("ours", None, Timing((2.0, 2.0, 2.5)), Timing((1.6,)), Timing((120.0,)), 3 << 20, 1 << 19)
    fused = PeerResult("torch fused", fused_note, Timing((5.0,)), Timing((4.0,)), Timing((900.0,)), 2 << 20, 0)
    verdict = Verdict("tiny_dense", case, {"parameter": (1e-8, 2e-8)}, 3e-8)
    return Row(TINY_SETS["tiny_dense"], CASES[case], 1.2, verdict, [ours, fused, *peers[2:]])


FACTS = {
    "device": "NVIDIA H200",
    "date": "2026-11-30",
    "commit": "abc",
    "torch": "2.11",
    "driver": "580",
    "command": "x",
}


def test_the_page_shows_ratios_marks_and_absent_peers() -> None:
    note = "moments in bfloat16, fewer bytes"
    text = page(FACTS, 4.26e12, [result("fp32", fused_note=None), result("bf16_state32", fused_note=note)])
    assert "on one NVIDIA H200 (driver 580, torch 2.11), commit abc." in text
    assert "in the same run, 4.26 TB/s" in text
    times = "| 1.20 | 2.00 [2.00, 2.25] | 1.60 [1.60, 1.60] | 0.600 | 0.750 "
    assert f"| tiny_dense, fp32 {times}| 5.00 [5.00, 5.00] | 4.00 [4.00, 4.00] | 2.50 | 2.50 |" in text
    assert "| 5.00 [5.00, 5.00] (1) | 4.00 [4.00, 4.00] (1) | 2.50 | 2.50 |" in text
    assert f"(1) {note}" in text
    assert "| 2.00 / 1.60 | 5.00 / 4.00 (1) | not installed |" in text
    assert "| tiny_dense, fp32 | 120 | 900 | 3, 0.5 | 2, 0.0 |" in text
    assert "| tiny_dense, fp32 | 1.0e-08 / 2.0e-08 | - | - | - | 3.0e-08 |" in text
    short = short_table(4.26e12, [result("fp32", fused_note=None)]).splitlines()
    assert short[0] == "device copy 4.260 TB/s; milliseconds"
    assert short[2].split() == ["tiny_dense", "fp32", "1.20", "2.00", "1.60", "0.600", "0.750", "2.50", "2.50", "120"]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells under 2 headers"):
        report.markdown_table(["a", "b"], [["1"]])


def test_json_reads_back_and_keeps_rows_on_lines(tmp_path: Path) -> None:
    content = {"a": 1, "rows": [{"x": [1.5, 2]}, {"x": []}], "empty": []}
    path = tmp_path / "new" / "x.json"
    report.write_json(path, content)
    assert json.loads(path.read_text()) == content
    assert len(path.read_text().splitlines()) == 8
    with pytest.raises(ValueError, match="Out of range float"):
        report.write_json(path, {"a": math.nan})
    assert report.significant(123456.789) == 123460.0


def test_the_commit_must_be_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="name it with --commit"):
        report.current_commit()


def run_optim(out: Path, *more: str, **given: Any) -> int:
    chosen = ["--sets", "tiny_dense,tiny_shards", "--cases", "bf16_state32", "--device", "cpu", "--commit", "abc"]
    return run.main(["optim", "--out", str(out), "--quick", *chosen, *more], **given)


def test_the_command_writes_both_files_and_ends_with_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_optim(tmp_path) == 0
    content = json.loads((tmp_path / "optimizer.json").read_text())
    assert content["environment"]["commit"] == "abc"
    assert content["environment"]["command"].endswith("--device cpu --commit abc")
    assert content["implementation"] == "reference"
    rows = content["rows"]
    assert [(r["set"], r["case"]) for r in rows] == [("tiny_dense", "bf16_state32"), ("tiny_shards", "bf16_state32")]
    assert rows[0]["floor_bytes"] == 24 * rows[0]["parameters"]
    ours = rows[0]["peers"][0]
    assert ours["name"] == "ours"
    assert ours["eager_ms"]["calls"] >= len(ours["eager_ms"]["samples"]) > 0
    loops = next(p for p in rows[0]["peers"] if p["name"] == "torch for-loop")
    assert loops["note"] == "not run"
    assert "# Clipped AdamW step" in (tmp_path / "optimizer.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["tiny_shards", "bf16_state32"]


def test_a_wrong_step_gets_no_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_optim(tmp_path, build_ours=WithoutClipping) == 1
    captured = capsys.readouterr()
    assert "wrong result, no times: tiny_dense, bf16_state32: parameter: relative RMS error" in captured.err
    assert "timing" not in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sets", "pi06"], "unknown set pi06; valid: all, pi05_expert"),
        (["--cases", "fp8"], "unknown case fp8; valid: all, fp32"),
        (
            ["--sets", "pi05_expert"],
            "pi05_expert on a CPU would say nothing; use --sets tiny_dense,tiny_many,tiny_shards",
        ),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run.main(["optim", "--out", str(tmp_path), "--device", "cpu", "--sets", "tiny_dense", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("script", ["run.py optim", "lightning_loop.py"])
def test_the_documented_commands_start(script: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", "kernels"])}
    file, *rest = script.split()
    command = [sys.executable, f"kernels/bench/{file}", *rest, "--help"]
    run_ = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run_.returncode == 0, run_.stderr
    assert "--out" in run_.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_case_runs_on_the_gpu_with_graphs(tmp_path: Path) -> None:
    sets = ",".join(TINY_SETS)
    assert (
        run.main(["optim", "--out", str(tmp_path), "--quick", "--sets", sets, "--device", "cuda", "--commit", "a"]) == 0
    )
    content = json.loads((tmp_path / "optimizer.json").read_text())
    assert content["implementation"] == "triton"
    assert content["environment"]["driver"]
    for row in content["rows"]:
        ours = row["peers"][0]
        assert ours["graphed_ms"]["median"] > 0
        for peer in row["peers"]:
            assert ("graphed_ms" in peer) == ("eager_ms" in peer and peer["name"] not in ("apex", "bitsandbytes"))
        assert ours["state_bytes"] > 0
        assert ours["extra_bytes"] >= 0


# -- the training loop ------------------------------------------------------------------------------------------------


def instant(name: str, ts: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": 1.0}


def launched(kind: str, correlation: int, ts: float, duration: float, name: str) -> list[dict[str, Any]]:
    """A launch at `ts` on the host and its kernel, much later on the device."""
    args = {"correlation": correlation}
    return [
        {"ph": "X", "cat": kind, "name": "launch", "ts": ts, "dur": 2.0, "args": args},
        {"ph": "X", "cat": "kernel", "name": name, "ts": ts + 5000, "dur": duration, "args": args},
    ]


def test_kernels_belong_to_the_part_that_launched_them() -> None:
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "ts": 0}]
    for step in range(3):
        t = 1000.0 * step
        events += [instant(START, t), instant(GRADIENTS, t + 500), instant(END, t + 700)]
        events += launched("cuda_runtime", 10 * step + 1, t + 100, 300.0, "gemm")
        events += launched("cuda_runtime", 10 * step + 2, t + 550, 40.0, "norm")
        events += launched("cuda_driver", 10 * step + 3, t + 600, 60.0 + step, "update")
        events += launched("cuda_runtime", 10 * step + 4, t + 800, 1000.0, "between steps")
    events.append({"ph": "X", "cat": "kernel", "name": "stray", "ts": 1.0, "dur": 9.0, "args": {"correlation": 99}})
    profile = step_profile(events)
    assert profile.steps == 2
    assert profile.device_ms == pytest.approx(0.4 + (1 + 2) / 2e3)
    assert profile.optimizer_ms == pytest.approx(0.1 + (1 + 2) / 2e3)
    assert profile.optimizer_launches == 2
    assert profile.host_ms == pytest.approx(0.7)
    assert profile.host_optimizer_ms == pytest.approx(0.2)
    assert profile.unmatched == 1
    assert profile.kernels == {"update": pytest.approx(0.0615), "norm": pytest.approx(0.04)}


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two marked steps"):
        step_profile([instant(START, 0), instant(GRADIENTS, 1), instant(END, 2)])


def test_the_full_model_has_0_4_billion_parameters() -> None:
    with torch.device("meta"):
        model = lightning_loop.LanguageModel(lightning_loop.SIZES["full"], torch_fused=False)
    assert sum(p.numel() for p in model.parameters()) == 414_522_880


def test_the_loop_runs_and_both_strategies_learn_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--size", "tiny", "--out", str(tmp_path), "--device", "cpu", "--commit", "abc"]
    assert lightning_loop.main(arguments) == 0
    content = json.loads((tmp_path / "lightning_loop.json").read_text())
    auto, soma = content["runs"]
    assert (auto["optimizer"], soma["optimizer"]) == ("AdamW", "FusedAdamW")
    assert len(auto["losses"]) == 12
    assert auto["losses"] == pytest.approx(soma["losses"], rel=1e-3)
    assert auto["losses"][-1] < auto["losses"][0]
    assert len(auto["step_ms_samples"]) == 2 * (12 - 2 - 1)
    for one in (auto, soma):
        assert one["profile"]["steps"] == 3
        assert 0 < one["profile"]["host_optimizer_ms"] < one["profile"]["host_ms"]
    assert content["optimizer_floor_ms"] > 0
    page_text = (tmp_path / "lightning_loop.md").read_text()
    assert '| `strategy="somaspeed"`, FusedAdamW |' in page_text
    assert not list(tmp_path.glob("run_report*"))


def test_losses_that_differ_are_not_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(size: Any, device: Any) -> tuple[list[lightning_loop.Run], float]:
        runs = [
            lightning_loop.Run(strategy, "AdamW", 1, Timing((1.0,)), None, losses)  # type: ignore[arg-type]
            for strategy, losses in (("auto", [2.0, 1.0]), ("somaspeed", [2.0, 1.1]))
        ]
        return runs, 1e9

    monkeypatch.setattr(lightning_loop, "measure", measured)
    arguments = ["--size", "tiny", "--out", str(tmp_path), "--device", "cpu", "--commit", "abc"]
    assert lightning_loop.main(arguments) == 1
    assert "the losses differ by 1.00e-01, more than 0.01; nothing written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("main", [lambda *a: run.main(["optim", *a]), lambda *a: lightning_loop.main([*a])])
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:9", r"--device cuda:9: this machine has \d+ CUDA devices"),
        ("tpu0", "--device tpu0 is no device; use cpu, cuda"),
        ("xpu", "--device xpu is not measured here; use cpu or cuda"),
    ],
)
def test_devices_that_are_not_there_are_refused(
    main: Any, device: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main("--out", str(tmp_path), "--device", device, "--commit", "abc")
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "main", [lambda *a: run.main(["optim", "--sets", "tiny_dense", *a]), lambda *a: lightning_loop.main([*a])]
)
def test_a_place_that_holds_no_results_is_refused_before_anything_is_measured(
    main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main("--out", str(tmp_path / "file"), "--device", "cpu", "--commit", "abc")
    assert "cannot be a folder for results: File exists" in capsys.readouterr().err


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        lightning_loop.main(["--size", "tiny", "--out", str(tmp_path), "--steps", "8", "--commit", "abc"])
    assert "steps=8 is too few for 2 of warm-up and 4 profiled ones; give at least 9" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_loop_attributes_device_time_on_the_gpu(tmp_path: Path) -> None:
    arguments = ["--size", "tiny", "--out", str(tmp_path), "--device", "cuda", "--commit", "abc"]
    assert lightning_loop.main(arguments) == 0
    for one in json.loads((tmp_path / "lightning_loop.json").read_text())["runs"]:
        profile = one["profile"]
        assert 0 < profile["optimizer_ms"] < profile["device_ms"]
        assert profile["optimizer_launches"] >= 1
        assert sum(profile["kernels"].values()) == pytest.approx(profile["optimizer_ms"])
