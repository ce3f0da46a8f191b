"""What is the pi0.5 network? A frozen prefix, an action expert on its keys and values, and the flow that joins them.

Flow time runs from 1 (pure noise) to 0 (data): x_t = t * noise + (1 - t) * actions, and the network predicts the
velocity u = noise - actions (pi0, Black et al. 2024; pi0.5, Physical Intelligence 2025).

Shape letters: B observations, T draws of (noise, time) an observation, N = B * T, H horizon, A action width, L prompt
tokens, R image resolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from soma_kernels.frozen.reference import FP8
from soma_lightning.frozen_layers import why_no_fp8
from soma_lightning.models.flow import euler_sample, interpolate
from soma_lightning.models.pi05.config import PI05Config, Trainable
from soma_lightning.models.pi05.expert import ActionExpert
from soma_lightning.models.pi05.graphs import ExpertGraphs
from soma_lightning.models.pi05.initialization import initialize_expert
from soma_lightning.models.pi05.prefix import PI05Prefix, PrefixCache

if TYPE_CHECKING:
    from soma_lightning.models.pi05.lora import LoRAConfig

#: Which parameters stay in fp32 when the matrix products run in bf16: parts of our parameter names, per family.
FP32_ISLANDS: dict[str, tuple[str, ...]] = {
    "lerobot": ("vision_tower.", "multi_modal_projector.", "norm.", "action_", "time_mlp_"),
    "openpi": (
        "vision_tower.embeddings.",
        "_layernorm.",
        "language_model.norm.",
        "expert.norm.",
        "action_",
        "time_mlp_",
    ),
}
#: Names that the patterns above would catch although the family computes them in bf16.
_NO_ISLAND: dict[str, tuple[str, ...]] = {"lerobot": (), "openpi": ("vision_tower.post_layernorm.",)}


class PI05Model(nn.Module):
    """The network without tokenizer, image preparation and statistics: normalised tensors in, velocities out.

    Starts like the public code (adaptive norms at zero, so the expert is an identity); `checkpoint.load_weights`
    replaces the values, `initialization.initialize_from_scratch` prepares training without a checkpoint. Parts are
    frozen as `config.trainable` says. Build it under `torch.device("meta")` to allocate nothing.
    """

    #: Units for sharding and activation checkpointing: each is always entered through its own forward.
    _no_split_modules: ClassVar[list[str]] = ["SiglipEncoderLayer", "PrefixLayer", "ExpertLayer"]
    #: Computed in fp32 under autocast too: their weights are not gathered in a lower dtype.
    _keep_in_fp32_modules: ClassVar[list[str]] = ["action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"]
    #: Entry points besides forward (FSDP gathers the root's parameters before each).
    forward_methods: ClassVar[tuple[str, ...]] = ("encode_prefix", "velocity", "flow_loss", "sample_actions")

    def __init__(self, config: PI05Config) -> None:
        super().__init__()
        self.config = config
        self.prefix = PI05Prefix(config)
        self.expert = ActionExpert(config)
        self.graphs: ExpertGraphs | None = None
        self.gradient_checkpointing = False
        self.lora: LoRAConfig | None = None
        initialize_expert(self.expert)
        cast_to_islands(self, getattr(torch, config.dtype), config.islands)
        self.freeze(config.trainable)

    def encode_prefix(
        self,
        images: list[Tensor],
        image_masks: list[Tensor],
        tokens: Tensor,
        token_mask: Tensor,
        compact: bool = True,
    ) -> PrefixCache:
        """Runs images and prompt once; everything else reads the result.

        images: one float [B, 3, R, R] in -1..1 a camera slot; image_masks: one bool [B] a slot, True = readable;
        tokens: int64 [B, L]; token_mask: bool [B, L]. Slots that are masked in every row are not computed and may be
        left out; a masked image may hold anything, NaN included. Masks may live on the CPU while the model does not:
        then nothing waits for the device.
        compact: readable tokens move to the front and the sequence is cut to the longest row. Exact, because masked
        tokens take no position and are never read; False keeps the padded shape (for static shapes).

        Gradients flow only if a parameter of the prefix is trainable. Raises ValueError for shapes that do not fit and
        for a row without any readable token.
        """
        trains = torch.is_grad_enabled() and self.prefix_trains
        with torch.set_grad_enabled(trains):
            cache: PrefixCache = self.prefix(images, image_masks, tokens, token_mask, compact)
        return cache

    def velocity(self, prefix: PrefixCache, x_t: Tensor, time: Tensor) -> Tensor:
        """Predicted velocity (noise - actions), float32 [N, H, A].

        x_t: [N, H, A] with N = B * T; row n reads prefix row n // T. time: [N], 1 = noise, 0 = data.
        """
        self._check_rows(prefix, x_t, time)
        if self.graphs is not None:
            return self.graphs.velocity(prefix, x_t, time)
        v: Tensor = self.expert(prefix, x_t, time)
        return v

    def flow_loss(self, prefix: PrefixCache, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Squared error of the velocity, elementwise: float32 [N, H, A].

        actions: [B, H, A], normalised and zero-padded, shared by the T draws. noise: standard normal [N, H, A];
        time: [N]. The prefix is never repeated.
        """
        if actions.shape[0] != prefix.lengths.shape[0]:
            raise ValueError(f"actions have {actions.shape[0]} rows, but the prefix has {prefix.lengths.shape[0]}")
        x_t, target = interpolate(actions.float(), noise.float(), time)
        return (self.velocity(prefix, x_t, time) - target).square()

    @torch.no_grad()
    def sample_actions(self, prefix: PrefixCache, noise: Tensor, num_steps: int) -> Tensor:
        """Integrates the flow from noise (t = 1) to actions (t = 0) in Euler steps: float32 [N, H, A].

        noise: standard normal [N, H, A]; num_steps: steps of size 1 / num_steps.
        """
        if self.graphs is not None:
            return self.graphs.sample(prefix, noise.float(), num_steps)
        return euler_sample(lambda x_t, time: self.velocity(prefix, x_t, time), noise.float(), num_steps)

    def freeze(self, trainable: Trainable) -> None:
        """Says what trains: "expert" freezes the whole prefix, "all_but_vision" the vision tower (its projector trains,
        as with lerobot's `freeze_vision_encoder`), "all" trains everything that the loss can reach.

        The dead end of the last prefix layer stays frozen in all of them: it never gets a gradient. Call it before
        anything that is made for what trains: raises ValueError after adapters, checkpointed layers, and for a prefix
        in fp8 or beside CUDA graphs, which send it no gradients.
        """
        frozen = {
            "expert": [self.prefix],
            "all_but_vision": [self.prefix.paligemma.vision_tower, *self.prefix.unreached_modules()],
            "all": self.prefix.unreached_modules(),
        }
        if trainable not in frozen:
            raise ValueError(f"trainable={trainable!r} must be one of {list(get_args(Trainable))}")
        self._check_changeable(trainable)
        self.requires_grad_(True)
        for module in frozen[trainable]:
            module.requires_grad_(False)
        self.train(self.training)

    def _check_changeable(self, trainable: Trainable) -> None:
        if self.lora is not None:
            raise ValueError("adapters say what trains; build another model to train other parts")
        if self.gradient_checkpointing:
            raise ValueError("the layers that train are checkpointed already; freeze before that")
        if trainable == "expert":
            return
        if self.graphs is not None:
            raise ValueError(
                f"trainable={trainable!r} and CUDA graphs of the expert exclude each other; use one of them"
            )
        if any(p.dtype == FP8 for p in self.prefix.parameters()):
            raise ValueError(f"trainable={trainable!r}, but the prefix is in fp8, which does not train; leave out fp8")

    def release_prefix(self) -> None:
        """Frees the memory of the frozen prefix: from here on its outputs must come from elsewhere; not undone.

        It stays as an attribute on the meta device, for its names and shapes, and is no part of the module any more:
        no parameter, no state. Raises ValueError when a part of it trains.
        """
        if self.prefix_trains:
            raise ValueError("a part of the prefix trains, so its outputs cannot come from elsewhere")
        shell = self.prefix.to("meta")
        del self._modules["prefix"]
        object.__setattr__(self, "prefix", shell)

    @property
    def prefix_trains(self) -> bool:
        """Whether any parameter of the prefix does, adapters included."""
        return any(p.requires_grad for p in self.prefix.parameters())

    @property
    def has_prefix(self) -> bool:
        """False after `release_prefix`."""
        return "prefix" in self._modules

    def quantize_frozen(self) -> None:
        """Stores the frozen prefix's matrices in fp8 and runs its products there (frozen_layers.py); not undone.

        Only checkpoints that hold the unrounded weights can be saved afterwards (`checkpoint.save_weights`). Raises
        ValueError when the prefix trains, is in fp32, keeps its vision tower in fp32, or lies on a device without fp8
        products.
        """
        check_fp8(self.config)
        first = next(self.prefix.parameters())
        if self.prefix_trains:
            raise ValueError("frozen_precision='fp8' needs a frozen prefix, but adapters of it train")
        if why := why_no_fp8(first.device):
            raise ValueError(f"frozen_precision='fp8': {why}")
        self.prefix.quantize()
        self.train(self.training)  # new modules start in training mode

    def frozen_modules(self) -> list[nn.Module]:
        """The largest modules of which no parameter trains; they stay in eval mode."""
        return list(_frozen(self))

    def use_cuda_graphs(self, bucket: int = 32, limit: int = 8) -> None:
        """Records the expert's passes as CUDA graphs, one a shape, and replays them (graphs.py says what that asks).

        bucket: prefixes are padded to multiples of this many tokens. limit: recordings that are kept.
        Raises ValueError when the prefix trains, to which a recording sends no gradients, and with checkpointed layers.
        """
        if self.prefix_trains:
            raise ValueError("a part of the prefix trains, to which CUDA graphs of the expert would send no gradients")
        if self.gradient_checkpointing:
            raise ValueError("gradient checkpointing and CUDA graphs exclude each other; use one of them")
        self.graphs = ExpertGraphs(self.expert, bucket, limit)

    def gradient_checkpointing_enable(self) -> None:
        """Layers with trainable parameters keep their inputs only, and run again in the backward pass.

        Frozen layers leave nothing behind that could be spared, and stay as they are. Call it once, after everything
        that decides what trains. Raises ValueError when no layer trains, and when CUDA graphs are on, whose memory is
        fixed by the recording.
        """
        if self.graphs is not None:
            raise ValueError("gradient checkpointing and CUDA graphs exclude each other; use one of them")
        if self.gradient_checkpointing:
            raise ValueError("gradient checkpointing is on already")
        blocks = self.trainable_blocks()
        if not blocks:
            raise ValueError("gradient checkpointing would change nothing, because no layer trains; leave it out")
        self.gradient_checkpointing = True
        for block in blocks:  # no layer draws random numbers
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)

    def trainable_blocks(self) -> list[nn.Module]:
        """The layers (`_no_split_modules`) of which some parameter trains."""
        blocks = [m for m in self.modules() if type(m).__name__ in self._no_split_modules]
        return [block for block in blocks if any(p.requires_grad for p in block.parameters())]

    def compile_layers(self, bucket: int = 32, **options: Any) -> None:
        """Compiles the layers that run as modules: each kind once for a shape, because its layers share the code.

        Those of a frozen prefix whose kernels are fused anyway are left alone.

        bucket: compact prefixes are padded to multiples of this many prompt tokens, so that few shapes occur; exact,
        as all padding. options: of torch.compile. Call it when the parameters are where they stay; copies of the model
        that are made later would run the layers of this one.
        """
        if bucket < 1:
            raise ValueError(f"bucket={bucket} must be at least 1 token")
        self.prefix.bucket = bucket
        for part in (self.expert, *self.prefix.unfused()):
            for module in part.modules():
                if type(module).__name__ in self._no_split_modules:
                    module.forward = torch.compile(module.forward, dynamic=False, **options)

    def trainable_names(self) -> list[str]:
        """Names of the parameters that train."""
        return [name for name, p in self.named_parameters() if p.requires_grad]

    def check_dtypes(self) -> None:
        """Raises ValueError when something has cast parameters away from what config.dtype and config.islands say.

        `module.to(dtype)` and Lightning's "true" precisions do: they round the fp32 islands, unseen.
        """
        config = self.config
        wanted = {
            name: _dtype_of(name, getattr(torch, config.dtype), config.islands) for name, _ in self.named_parameters()
        }
        parameters = {name: p for name, p in self.named_parameters() if p.dtype != FP8 and ".lora_" not in name}
        cast = [f"{name} is {p.dtype}" for name, p in parameters.items() if p.dtype != wanted[name]]
        if cast:
            raise ValueError(
                f"{len(cast)} parameters were cast away from config.dtype={config.dtype!r} with the fp32 islands of "
                f"{config.islands} ({cast[0]}), which would round what must stay fp32; use precision='32-true' or "
                "'bf16-mixed', and choose the storage with config={'dtype': 'bfloat16'}"
            )

    def train(self, mode: bool = True) -> PI05Model:
        """Like nn.Module.train, but frozen modules stay in eval mode."""
        super().train(mode)
        for module in self.frozen_modules():
            module.eval()
        return self

    def _check_rows(self, prefix: PrefixCache, x_t: Tensor, time: Tensor) -> None:
        B, A = prefix.lengths.shape[0], self.config.max_action_dim
        if x_t.dim() != 3 or x_t.shape[0] % B or x_t.shape[-1] != A:
            raise ValueError(
                f"x_t must be [N, H, A] with N a multiple of the prefix's {B} rows and A = {A}, got {tuple(x_t.shape)}"
            )
        if time.shape != x_t.shape[:1]:
            raise ValueError(f"time must be [N] = {tuple(x_t.shape[:1])}, got {tuple(time.shape)}")


def check_fp8(config: PI05Config) -> None:
    """Raises ValueError for a network whose frozen prefix has no fp8 form."""
    for name, value in {"trainable": "expert", "dtype": "bfloat16", "islands": "openpi"}.items():
        if getattr(config, name) != value:
            raise ValueError(f"frozen_precision='fp8' needs {name}={value!r}, got {getattr(config, name)!r}")


def _frozen(module: nn.Module) -> Iterator[nn.Module]:
    parameters = list(module.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        yield module
        return
    for child in module.children():
        yield from _frozen(child)


def cast_to_islands(model: nn.Module, dtype: torch.dtype, islands: str) -> None:
    """Casts parameters in place to `dtype`, except the fp32 islands of the family `islands` ("lerobot", "openpi")."""
    if islands not in FP32_ISLANDS:
        raise ValueError(f"islands={islands!r} is unknown; known: {sorted(FP32_ISLANDS)}")
    for name, p in model.named_parameters():
        p.data = p.data.to(_dtype_of(name, dtype, islands))


def _dtype_of(name: str, dtype: torch.dtype, islands: str) -> torch.dtype:
    is_island = any(part in name for part in FP32_ISLANDS[islands])
    return torch.float32 if is_island and not any(part in name for part in _NO_ISLAND[islands]) else dtype
