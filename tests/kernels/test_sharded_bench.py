"""The benchmark of sharded layouts: the run, the comparison that withholds times, failing ranks, bytes, the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import sharded, sharded_jobs
from bench.gate import WrongResultError
from bench.sharded_contenders import CONTENDERS, DEFAULT_CONTENDERS
from bench.sharded_jobs import run_waves
from bench.sharded_models import DISTINCT_BATCHES, MODELS, batches, build
from bench.sharded_results import Result, check, without_lonely
from bench.sharded_trace import busy_times
from bench.sharded_worker import Job

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("sharded_bench")

CPU = torch.device("cpu")
TINY = sharded.STEPS["tiny"]


# -- the whole command -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sharded")
    arguments = ["--size", "tiny", "--device", "cpu", "--models", "transformer", "--contenders", "ddp,somaspeed"]
    assert sharded.main([*arguments, "--out", str(out), "--commit", "abc"]) == 0
    return out


def test_the_command_compares_before_it_times(folder: Path) -> None:
    content = json.loads((folder / "sharded.json").read_text())
    assert content["environment"]["commit"] == "abc"
    rows = {row["contender"]: row for row in content["rows"]}
    assert list(rows) == ["ddp", "somaspeed", "somaspeed, one process", "stock, one process"]
    for name, row in rows.items():
        assert row["reason"] is None
        assert len(row["step_ms_samples"]) == TINY.timed
        assert len(row["losses"]) == TINY.total
        assert len(row["norms"]) == TINY.checked
        assert row["ranks"] == (1 if "one process" in name else 2)
    assert rows["ddp"]["losses"][2 * DISTINCT_BATCHES] < rows["ddp"]["losses"][0]
    (ours, alone) = content["agreements"]
    assert (ours["contender"], ours["reference"]) == ("somaspeed", "ddp")
    assert alone["contender"] == "stock, one process"
    assert 0 < ours["loss"] < 1e-3


def test_bytes_are_those_of_the_layout(folder: Path) -> None:
    rows = {row["contender"]: row for row in json.loads((folder / "sharded.json").read_text())["rows"]}
    ours, ddp = (rows[name]["reports"][0] for name in ("somaspeed", "ddp"))
    trained = ours["trained"]
    assert trained == ddp["trained"] == sum(p.numel() for p in build(MODELS["tiny"]["transformer"](), CPU).parameters())
    # Two ranks: half of what is reduced in fp32 leaves a rank, all of what is summed.
    assert ours["traffic"]["sent"]["reduce_scatter"] == pytest.approx(2 * trained, rel=0.01)
    assert ours["traffic"]["calls"]["all_reduce"] == 1
    assert ours["traffic"]["sent"]["all_reduce"] < 100
    # The root is gathered once; norms stay in fp32.
    assert trained <= ours["traffic"]["sent"]["all_gather"] < 2.2 * trained
    assert ddp["traffic"]["sent"] == {"all_reduce": 4 * trained}


def test_the_page_says_what_was_compared(folder: Path) -> None:
    page = (folder / "sharded.md").read_text()
    assert "| ddp | " in page
    assert "| somaspeed | ddp | " in page
    assert "- **stock, one process**: " in page
    assert "-> " not in page


@pytest.mark.slow
def test_ranks_that_train_by_themselves_are_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--size", "tiny", "--device", "cpu", "--models", "transformer", "--contenders", "ddp,unsynchronized"]
    assert sharded.main([*arguments, "--out", str(tmp_path), "--commit", "abc"]) == 1
    assert "of unsynchronized differ from ddp by" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_frozen_parameters_that_stock_fsdp2_gathers(tmp_path: Path) -> None:
    arguments = ["--size", "tiny", "--device", "cpu", "--models", "interleaved"]
    assert sharded.main([*arguments, "--out", str(tmp_path), "--commit", "abc"]) == 0
    rows = {row["contender"]: row for row in json.loads((tmp_path / "sharded.json").read_text())["rows"]}
    stock, ours = (rows[name]["reports"][0] for name in ("model_parallel", "somaspeed"))
    # Every frozen unit for the forward pass, and again in backward for nothing.
    assert stock["traffic"]["frozen_gathered"] > 1.5 * stock["frozen_bytes"]
    assert stock["traffic"]["frozen_held"] > 0
    assert ours["traffic"]["frozen_gathered"] == ours["traffic"]["frozen_held"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("model", list(MODELS["tiny"]))
def test_every_contender_runs_on_two_gpus(model: str, tmp_path: Path) -> None:
    names = ",".join(DEFAULT_CONTENDERS) if model == "transformer" else "ddp,somaspeed"
    arguments = ["--size", "tiny", "--device", "cuda", "--models", model, "--contenders", names]
    assert sharded.main([*arguments, "--out", str(tmp_path), "--commit", "abc"]) == 0
    rows = json.loads((tmp_path / "sharded.json").read_text())["rows"]
    assert [row["reason"] for row in rows] == [None] * len(rows)
    for report in (report for row in rows for report in row["reports"]):
        assert report["memory"]["peak"] > 0
        assert report["busy"]["compute"] > 0
    ours = next(row for row in rows if row["contender"] == "somaspeed")
    assert len(ours["reports"][0]["traffic"]["norm_us"]) == TINY.counted
    assert ours["reports"][0]["busy"]["communication"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "gpt"], "--models gpt is unknown; use some of pi05,interleaved,transformer"),
        (["--contenders", "ddp,deepspeed"], "--contenders deepspeed is unknown; use some of somaspeed,"),
        (["--contenders", "ddp"], "--contenders ddp leaves nobody to compare with; name two or more"),
        (["--size", "full"], "the full size on a CPU would say nothing; use --size tiny"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sharded.main(["--size", "tiny", "--device", "cpu", "--out", "nowhere", "--commit", "abc", *arguments])
    assert message in capsys.readouterr().err


def test_the_full_size_needs_two_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        sharded.main(["--out", "nowhere", "--device", "cuda", "--commit", "abc"])
    assert "this machine has 1 CUDA devices, 2 are needed; use --size tiny --device cpu" in capsys.readouterr().err


# -- the comparison ----------------------------------------------------------------------------------------------------


def report(**changes: Any) -> dict[str, Any]:
    return {"losses": [2.0, 1.0], "norms": [3.0, 2.0], "moment_squares": 4.0, "step_ms": [1.0], **changes}


def result(name: str, *reports: dict[str, Any]) -> Result:
    return Result("transformer", CONTENDERS[name], list(reports))


def test_contenders_that_train_alike_pass() -> None:
    ddp = result("ddp", report(losses=[1.9, 1.0]), report(losses=[2.1, 1.0]))
    ours = result("somaspeed", report(moment_squares=1.0), report(moment_squares=3.0))
    (agreement,) = check([ours, ddp])
    assert (agreement.contender, agreement.reference) == ("somaspeed", "ddp")
    assert agreement.loss == agreement.norm == agreement.moment == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": [2.0, 1.1]}, "the losses of somaspeed differ from ddp by 1.00e-01, more than 1e-02"),
        ({"losses": [2.0, float("nan")]}, "the losses of somaspeed differ from ddp by nan"),
        ({"norms": [3.0, 2.2]}, "the gradient norms of somaspeed differ from ddp by 1.00e-01, more than 5e-02"),
        ({"norms": []}, "zip"),
        ({"moment_squares": 3.0}, "the norm of the first moments of somaspeed differ"),
    ],
)
def test_one_that_trains_otherwise_is_caught(changes: dict[str, Any], message: str) -> None:
    ours = result("somaspeed", *(report(**{"moment_squares": 2.0, **changes}) for _ in range(2)))
    with pytest.raises((WrongResultError, ValueError), match=message):
        check([result("ddp", report(), report()), ours])


def test_a_model_that_was_trained_wrongly_takes_no_other_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = [report(moment_squares=2.0)] * 2, [report(losses=[2.0, 1.5])] * 2
    found = {("transformer", "ddp"): [report()] * 2, ("transformer", "somaspeed"): good}
    found |= {("interleaved", "ddp"): [report()] * 2, ("interleaved", "somaspeed"): bad}
    monkeypatch.setattr(sharded, "run_waves", lambda *_: found)
    arguments = ["--out", "nowhere", "--size", "tiny", "--contenders", "ddp,somaspeed"]
    chosen = sharded._parser().parse_args([*arguments, "--models", "interleaved,transformer"])
    sections, wrong = sharded.measure(chosen, "cpu")
    assert [section.model for section in sections] == ["transformer"]
    assert wrong == ["interleaved: the losses of somaspeed differ from ddp by 5.00e-01, more than 1e-02"]


def test_one_that_ran_alone_gets_no_times() -> None:
    failed = Result("transformer", CONTENDERS["ddp"], [], "CUDA out of memory")
    lonely, still_failed = without_lonely([result("somaspeed", report(), report()), failed])
    assert lonely.reason is not None
    assert lonely.reason.startswith("ran, but nobody else did")
    assert still_failed is failed
    assert check([lonely, failed]) == []


def test_both_ranks_count() -> None:
    slow = result("ddp", report(step_ms=[1.0, 5.0]), report(step_ms=[4.0, 2.0]))
    assert slow.step_ms.samples == (4.0, 5.0)


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Ranks run this text instead of the worker, with `job` and `rank` at hand; it prints what it has in `answer`."""
    head = "import json, os, sys, time\njob = json.load(open(sys.argv[1]))\nrank = int(os.environ.get('RANK', 0))\n"
    head += "assert sys.stdin.readline() == 'go\\n'\nanswer = dict(rank=rank)\n"

    def use(text: str) -> None:
        (tmp_path / "worker.py").write_text(f"{head}{text}\njson.dump(answer, open(sys.argv[2], 'w'))\n")
        monkeypatch.setattr(sharded_jobs, "WORKER", (sys.executable, str(tmp_path / "worker.py")))

    return use


def job(contender: str, world: int = 2) -> Job:
    return Job("transformer", "tiny", contender, "cpu", world, TINY)


def quiet(line: str) -> None:
    """Nobody watches."""


def test_a_rank_that_fails_is_a_reason_and_the_others_go_on(worker: Callable[[str], None], tmp_path: Path) -> None:
    worker("if job['contender'] == 'ddp' and rank: raise MemoryError('CUDA out of memory')")
    found = run_waves([[job("ddp")], [job("somaspeed")]], tmp_path / "jobs", 60.0, quiet)
    assert found["transformer", "ddp"] == "MemoryError: CUDA out of memory"
    assert found["transformer", "somaspeed"] == [{"rank": 0}, {"rank": 1}]


def test_a_rank_that_is_killed_is_named(worker: Callable[[str], None], tmp_path: Path) -> None:
    worker("if rank: os.kill(os.getpid(), 9)\nelse: time.sleep(60)")
    found = run_waves([[job("ddp")]], tmp_path / "jobs", 60.0, quiet)
    assert found["transformer", "ddp"] == "rank 1 ended: signal SIGKILL"


def test_ranks_that_hang_are_ended(
    worker: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_jobs, "JOB_SECONDS", 1.0)
    worker("time.sleep(60)")
    assert run_waves([[job("ddp")]], tmp_path / "jobs", 60.0, quiet)["transformer", "ddp"] == "not done after 1 s"


def test_nobody_starts_when_the_time_is_over(worker: Callable[[str], None], tmp_path: Path) -> None:
    worker("time.sleep(1)")
    waves = [[job("ddp")], [job("somaspeed"), job("fsdp")]]
    found = run_waves(waves, tmp_path / "jobs", 0.5, quiet)
    assert isinstance(found["transformer", "ddp"], list)
    late = "not started: the 0 s of --seconds were over"
    assert found["transformer", "somaspeed"] == found["transformer", "fsdp"] == late


def test_jobs_of_one_process_get_a_device_each(
    worker: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("WORLD_SIZE", "8")
    worker("answer = {name: os.environ.get(name) for name in ('CUDA_VISIBLE_DEVICES', 'WORLD_SIZE')}")
    jobs = [replace(job(name, world=1), device="cuda") for name in ("ddp", "somaspeed")]
    found = run_waves([jobs], tmp_path / "jobs", 60.0, quiet)
    assert found["transformer", "ddp"] == [{"CUDA_VISIBLE_DEVICES": "4", "WORLD_SIZE": None}]
    assert found["transformer", "somaspeed"] == [{"CUDA_VISIBLE_DEVICES": "6", "WORLD_SIZE": None}]


# -- figures -----------------------------------------------------------------------------------------------------------


def kernel(name: str, start: float, end: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}


def test_exposed_communication_is_what_nothing_overlaps() -> None:
    events = [
        kernel("gemm", 0, 1000),
        kernel("gemm", 500, 1500),
        kernel("ncclDevKernel_AllGather_RING_LL(args)", 1000, 2000),
        kernel("ncclDevKernel_AllReduce_Sum_f32(args)", 1900, 2500),
        kernel("adamw", 4000, 5000),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000},
    ]
    busy = busy_times(events, steps=2)
    assert busy is not None
    assert (busy.compute, busy.communication, busy.exposed, busy.idle) == (1.25, 0.75, 0.5, 0.75)
    assert busy.kernels == {"ncclDevKernel_AllGather": 0.5, "ncclDevKernel_AllReduce": 0.3}
    assert busy_times([events[-1]], steps=2) is None


@pytest.mark.parametrize("model", list(MODELS["tiny"]))
def test_flops_by_hand_are_those_that_torch_counts(model: str) -> None:
    problem = MODELS["tiny"][model]()
    network = build(problem, CPU)
    counter = FlopCounterMode(display=False)
    with counter, torch.autocast("cpu", dtype=torch.bfloat16):
        network(batches(problem, 0, CPU)[0]).backward()
    # Torch counts masked products, no backward to inputs without gradient, and pi0.5's own attention not at all.
    assert problem.flops == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_full_models_have_the_published_sizes() -> None:
    trained, frozen = {}, {}
    for model, make in MODELS["full"].items():
        network = build(make(), torch.device("meta"))
        trained[model] = sum(p.numel() for p in network.parameters() if p.requires_grad)
        frozen[model] = sum(p.numel() for p in network.parameters() if not p.requires_grad)
    assert trained["pi05"] + frozen["pi05"] == 3_353_433_872
    assert trained["pi05"] == pytest.approx(430e6, rel=0.01)
    assert trained["transformer"] == pytest.approx(1.04e9, rel=0.01)
    assert trained["interleaved"] == pytest.approx(430e6, rel=0.4)
    assert frozen["interleaved"] == pytest.approx(18 * 110.1e6, rel=0.02)
    assert set(DEFAULT_CONTENDERS) < set(CONTENDERS)
