"""One contender of the benchmark of pi0.5's training step, in a process of its own: lerobot's network, or ours.

    python -m bench.pi05_step_worker JOB.json RESULT.json

The first contender of a job that finds no weights in the job's folder makes them; all others load the same file. Every
contender takes the same images, tokens, actions, noise and flow times, already on the device; tokenizing is not timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.timing import Budget, Timing, time_on_device

ACTION_DIM = 7
NUM_STEPS = 10
CAMERAS = ("observation.images.image", "observation.images.image2")
ADAPTIVE_STD = 0.02  # public start values make the expert an identity, which would hide mistakes
BUDGETS = {
    "base": Budget(repeats=15, seconds=2.0, limit=8.0, warmup=3),
    "tiny": Budget(repeats=3, seconds=0.01, limit=1.0, warmup=1),
}
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Job:
    """What one process measures.

    folder: where the weights lie, and the actions that contenders are compared with. kind: "lerobot" or "ours";
    settings: of that kind. rows: batch sizes of training steps; sample_rows: of action sampling.
    """

    name: str
    kind: str
    folder: str
    rows: list[int]
    sample_rows: list[int]
    size: str = "base"
    device: str = "cuda"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def all_rows(self) -> list[int]:
        """Every batch size once, those of training first."""
        return list(dict.fromkeys([*self.rows, *self.sample_rows]))


@dataclass(frozen=True)
class Shape:
    """Of a batch. pixels: of the cameras; prompt: tokens, and the length that they are padded to."""

    pixels: int
    resolution: int
    prompt: tuple[int, int]
    horizon: int
    max_action_dim: int

    def prompt_mask(self, rows: int) -> Tensor:
        """bool [rows, length] on the CPU."""
        tokens, length = self.prompt
        return (torch.arange(length, device="cpu") < tokens)[None].repeat(rows, 1)


SHAPES = {"base": Shape(256, 224, (60, 200), 50, 32), "tiny": Shape(80, 64, (9, 32), 8, 7)}


@dataclass
class Row:
    """One batch size. Times in milliseconds; memory in bytes; note: why not.

    loss, grad_norm: of the first step. action_error: of sampled actions against the first contender's, relative RMS.
    backbone: bytes of the frozen parameters.
    """

    rows: int
    note: str | None = None
    loss: float | None = None
    grad_norm: float | None = None
    step: tuple[float, ...] = ()
    forward: tuple[float, ...] = ()
    peak: int | None = None
    sample: tuple[float, ...] = ()
    action_error: float | None = None
    backbone: int | None = None


class Contender:
    """A network with its optimizer."""

    def loss(self, inputs: Inputs) -> Tensor:
        """Mean squared error of the velocity over the real action dimensions, 0-d."""
        raise NotImplementedError

    def update(self) -> Tensor:
        """Clips at norm 1, steps, drops the gradients; returns the gradient norm, 0-d."""
        raise NotImplementedError

    def actions(self, inputs: Inputs) -> Tensor:
        """Actions sampled in NUM_STEPS steps from the inputs' noise, [rows, H, ACTION_DIM]."""
        raise NotImplementedError

    def prepare(self, inputs: Inputs) -> None:
        """Whatever may be done once for a batch."""

    def frozen_bytes(self) -> int:
        """Memory of what does not train."""
        raise NotImplementedError


def make_inputs(shape: Shape, rows: int, device: torch.device) -> Inputs:
    """The same for every contender: drawn on the CPU."""
    draw = torch.Generator().manual_seed(rows)
    inputs = {name: torch.rand(rows, 3, shape.pixels, shape.pixels, generator=draw) for name in CAMERAS}
    inputs["tokens"] = torch.randint(5, 600, (rows, shape.prompt[1]), generator=draw)
    inputs["token_mask"] = shape.prompt_mask(rows)
    inputs["actions"] = torch.randn(rows, shape.horizon, ACTION_DIM, generator=draw)
    inputs["noise"] = torch.randn(rows, shape.horizon, shape.max_action_dim, generator=draw)
    inputs["time"] = torch.rand(rows, generator=draw) * 0.999 + 0.001
    return {name: value.to(device) for name, value in inputs.items()}


# -- lerobot -----------------------------------------------------------------------------------------------------------


class LeRobot(Contender):
    """lerobot's pi0.5, expert only, in its bf16 profile, with torch's fused AdamW and clipping; in full size only.

    settings: compile_mode, None for eager.
    """

    def __init__(self, folder: Path, size: str, device: torch.device, compile_mode: str | None = None) -> None:
        from lerobot.configs import FeatureType, PolicyFeature
        from lerobot.policies.pi05.configuration_pi05 import PI05Config
        from lerobot.policies.pi05.modeling_pi05 import PI05Policy

        torch.set_float32_matmul_precision("high")
        shape = SHAPES[size]
        image = PolicyFeature(FeatureType.VISUAL, (3, shape.pixels, shape.pixels))
        empty = PolicyFeature(FeatureType.VISUAL, (3, shape.resolution, shape.resolution))
        state = PolicyFeature(FeatureType.STATE, (8,))
        compiling = {} if compile_mode is None else {"compile_mode": compile_mode}
        config = PI05Config(
            device=str(device),
            chunk_size=shape.horizon,
            n_action_steps=10,
            dtype="bfloat16",
            train_expert_only=True,
            gradient_checkpointing=False,
            compile_model=compile_mode is not None,
            input_features={
                **dict.fromkeys(CAMERAS, image),
                "observation.images.empty_camera_0": empty,
                "observation.state": state,
            },
            output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
            **compiling,
        )
        with torch.device(device):
            self.policy = PI05Policy(config).to(device)
        self.policy.model.paligemma_with_expert.gemma_expert.lm_head.requires_grad_(False)
        self._take_weights(folder / "model.safetensors")
        self.policy.train()
        self.trained = [p for p in self.policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=2.5e-5, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def _take_weights(self, file: Path) -> None:
        """Reads the job's weights, or makes them."""
        from safetensors.torch import load_file, save_file

        if file.exists():
            self.policy.load_state_dict(load_file(file, device=str(next(self.policy.parameters()).device)))
            return
        torch.manual_seed(0)
        for name, p in self.policy.named_parameters():
            if "norm.dense" in name:
                torch.nn.init.normal_(p, std=ADAPTIVE_STD)
        save_file({name: value.contiguous() for name, value in self.policy.state_dict().items()}, file)

    def loss(self, inputs: Inputs) -> Tensor:
        model = self.policy.model
        model.sample_noise = lambda shape, device: inputs["noise"]
        model.sample_time = lambda rows, device: inputs["time"]
        batch = {
            **{name: inputs[name] for name in CAMERAS},
            "observation.language.tokens": inputs["tokens"],
            "observation.language.attention_mask": inputs["token_mask"],
            "action": inputs["actions"],
        }
        found: Tensor = self.policy(batch)[0]
        return found

    def actions(self, inputs: Inputs) -> Tensor:
        batch = {
            **{name: inputs[name] for name in CAMERAS},
            "observation.language.tokens": inputs["tokens"],
            "observation.language.attention_mask": inputs["token_mask"],
        }
        found: Tensor = self.policy.predict_action_chunk(batch, noise=inputs["noise"], num_steps=NUM_STEPS)
        self.policy.train()
        return found

    def frozen_bytes(self) -> int:
        return sum(p.nbytes for p in self.policy.parameters() if not p.requires_grad)

    def update(self) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


# -- ours --------------------------------------------------------------------------------------------------------------


class Ours(Contender):
    """settings: islands, "lerobot" or "openpi"; cached: where a `FeatureCache` keeps frozen features, "device",
    "pinned" or "disk" (a folder beside the weights); None computes them in every step.

    fused: the frozen layers' kernels, instead of stock modules. fp8: the frozen backbone in fp8. bucket: of compiled
    layers; None for eager ones. graphs: the expert's passes as CUDA graphs.
    """

    def __init__(
        self,
        folder: Path,
        size: str,
        device: torch.device,
        islands: str = "openpi",
        *,
        cached: str | None = None,
        fused: bool = True,
        fp8: bool = False,
        bucket: int | None = None,
        graphs: bool = False,
    ) -> None:
        from soma_lightning.models.pi05.checkpoint import load_weights
        from soma_lightning.models.pi05.config import PI05Config
        from soma_lightning.models.pi05.model import PI05Model
        from soma_lightning.optim.fused_adamw import FusedAdamW

        torch.set_float32_matmul_precision("high")
        changes: dict[str, Any] = {"dtype": "bfloat16", "islands": islands}
        config = PI05Config.tiny(**changes) if size == "tiny" else PI05Config.base(**changes)
        if not (folder / "model.safetensors").exists():
            self._make_weights(config, folder, device)
        with torch.device("meta"):
            self.model = PI05Model(config)
        load_weights(self.model, folder, device)
        self.model.train()
        self.model.prefix.fuse_frozen = fused
        if fp8:
            self.model.quantize_frozen()
        if bucket is not None:
            self.model.compile_layers(bucket)
        if graphs and device.type == "cuda":  # a tiny run on a CPU has none
            self.model.use_cuda_graphs()
        self.shape = SHAPES[size]
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = FusedAdamW(self.trained, lr=2.5e-5, betas=(0.9, 0.95), weight_decay=0.01, master_weights=True)
        self.features = None if cached is None else str(folder / "features") if cached == "disk" else cached
        self._cache: Any = None

    def _make_weights(self, config: Any, folder: Path, device: torch.device) -> None:
        from soma_lightning.models.pi05.checkpoint import save_weights
        from soma_lightning.models.pi05.model import PI05Model

        torch.manual_seed(0)
        with torch.device(device):
            model = PI05Model(config)
        for name, p in model.expert.named_parameters():
            if "norm.dense" in name:
                torch.nn.init.normal_(p, std=ADAPTIVE_STD)
        save_weights(model, folder, "lerobot", None)

    def prepare(self, inputs: Inputs) -> None:
        """Fills the cache with the features of these inputs."""
        if self.features is None:
            return
        from soma_lightning.data.feature_cache import FeatureCache

        rows = len(inputs["tokens"])
        self._cache = FeatureCache(f"{self.features}_{rows}" if "/" in self.features else self.features, rows)
        self._prefix(inputs)
        self._cache.flush()

    def _prefix(self, inputs: Inputs) -> Any:
        """Live, or as training reads it from the cache."""
        if self._cache is None:
            return self._encoded(inputs)
        from soma_lightning.data.feature_cache import SAMPLES
        from soma_lightning.models.pi05.prefix import PrefixCache

        batch = {**inputs, SAMPLES: list(range(len(inputs["tokens"])))}
        return PrefixCache.from_features(self._cache.features(self, batch), self.model.config.language.head_dim)

    # What a feature cache asks a policy.

    @property
    def device(self) -> torch.device:
        return self.trained[0].device

    def check_features_fixed(self) -> None:
        """They are."""

    def feature_identity(self) -> dict[str, Any]:
        return {}

    def encode_features(self, batch: Mapping[str, Any]) -> Any:
        return self._encoded(dict(batch)).features()

    def _encoded(self, inputs: Inputs) -> Any:
        from soma_lightning.models.pi05.images import resize_with_padding

        images = [resize_with_padding(inputs[name], self.shape.resolution) for name in CAMERAS]
        # Masks on the CPU, as the policy's processor hands them out: nothing waits for the device.
        rows = len(inputs["tokens"])
        seen = [torch.ones(rows, dtype=torch.bool, device="cpu")] * len(images)
        return self.model.encode_prefix(images, seen, inputs["tokens"], self.shape.prompt_mask(rows))

    def loss(self, inputs: Inputs) -> Tensor:
        prefix = self._prefix(inputs)
        actions = torch.nn.functional.pad(inputs["actions"], (0, self.shape.max_action_dim - ACTION_DIM))
        errors = self.model.flow_loss(prefix, actions, inputs["noise"], inputs["time"])
        return errors[..., :ACTION_DIM].mean()

    @torch.no_grad()
    def actions(self, inputs: Inputs) -> Tensor:
        return self.model.sample_actions(self._prefix(inputs), inputs["noise"], NUM_STEPS)[..., :ACTION_DIM]

    def frozen_bytes(self) -> int:
        return sum(x.nbytes for x in self.model.prefix.state_dict().values())

    def update(self) -> Tensor:
        self.optimizer.clip(max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.optimizer.last_grad_norm


KINDS: Mapping[str, Callable[..., Contender]] = {"lerobot": LeRobot, "ours": Ours}


def measure(contender: Contender, job: Job, rows: int, device: torch.device) -> Row:
    """One batch size: a training step, action sampling, or both, as the job says."""
    row = Row(rows, backbone=contender.frozen_bytes())
    try:
        inputs = make_inputs(SHAPES[job.size], rows, device)
        contender.prepare(inputs)
        if rows in job.sample_rows:
            _measure_sampling(contender, inputs, row, job, device)
        if rows in job.rows:
            _measure_step(contender, inputs, row, job, device)
    except torch.OutOfMemoryError:
        row.note = "out of memory"
    return row


def _measure_step(contender: Contender, inputs: Inputs, row: Row, job: Job, device: torch.device) -> None:
    """The first step's loss and gradient norm, then times and memory."""
    loss = contender.loss(inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    row.loss, row.grad_norm = float(loss), float(contender.update())
    del loss

    def step() -> None:
        contender.loss(inputs).backward()  # type: ignore[no-untyped-call]
        contender.update()

    step()
    _reset_peak(device)
    row.step = _times(time_on_device(step, device, BUDGETS[job.size]))
    row.peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    with torch.no_grad():
        row.forward = _times(time_on_device(lambda: _run(contender, inputs), device, BUDGETS[job.size]))


def _measure_sampling(contender: Contender, inputs: Inputs, row: Row, job: Job, device: torch.device) -> None:
    """How far the actions are from the first contender's, which the job's folder keeps; then times."""
    from safetensors.torch import load_file, save_file

    file = Path(job.folder) / f"actions_{row.rows}.safetensors"
    actions = contender.actions(inputs).float().cpu().contiguous()
    if file.exists():
        first = load_file(file)["actions"]
        row.action_error = float((actions - first).square().mean().sqrt() / first.square().mean().sqrt())
    else:
        save_file({"actions": actions}, file)
    row.sample = _times(time_on_device(lambda: _sample(contender, inputs), device, BUDGETS[job.size]))


def _sample(contender: Contender, inputs: Inputs) -> None:
    contender.actions(inputs)


def _run(contender: Contender, inputs: Inputs) -> None:
    contender.loss(inputs)


def _times(timing: Timing) -> tuple[float, ...]:
    return tuple(round(sample, 3) for sample in timing.samples)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def results(job: Job) -> Iterator[Row]:
    """One row a batch size, each with the weights of the file (actions are sampled before they train)."""
    device = torch.device(job.device)
    for rows in job.all_rows:
        contender = KINDS[job.kind](Path(job.folder), job.size, device, **job.settings)
        yield measure(contender, job, rows, device)
        del contender
        _reset_peak(device)


def main() -> None:
    """Reads the job, writes the rows after each of them."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    rows: list[dict[str, Any]] = []
    for row in results(job):
        rows.append(asdict(row))
        Path(sys.argv[2]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
