"""What the sharded benchmark trains: pi0.5 with a frozen backbone, frozen and trained layers in turns, a transformer.

Each network is built straight on its device from one seed, takes a batch that lies there, and returns its loss. Frozen
parts are stored in bf16 and computed without autocast; what trains is stored in fp32 under bf16 autocast.

Shape letters: B rows, L tokens, W width, C cameras, R image resolution, H action horizon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Module

Batch = Mapping[str, Tensor]

#: Batches that are cycled through: few enough that the loss falls.
DISTINCT_BATCHES = 4
#: Standard deviation of the weights of pi0.5's expert: its public start is an identity and would hide mistakes.
EXPERT_STD = 0.02


@dataclass(frozen=True)
class Problem:
    """One network and what a rank feeds it.

    build: makes the network on the default device. batch: one batch of one rank from a generator on the CPU.
    unit_classes: blocks that a peer wraps, as its documentation advises; inside out.
    flops: multiplications and additions of one rank's forward and backward pass, by hand.
    rows: of one rank's batch.
    """

    what: str
    build: Callable[[], Module]
    batch: Callable[[torch.Generator], Batch]
    unit_classes: tuple[type[Module], ...]
    flops: float
    rows: int


# -- plain blocks ------------------------------------------------------------------------------------------------------


class FloatNorm(nn.LayerNorm):
    """Layer norm in fp32, whatever dtype its input and its weights come in; returns the input's."""

    def forward(self, x: Tensor) -> Tensor:
        out = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return out.to(x.dtype)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, mlp_width: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm, self.mlp_norm = FloatNorm(width), FloatNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x_BLW: Tensor) -> Tensor:
        """[B, L, W] -> [B, L, W]."""
        qkv = self.qkv(self.attention_norm(x_BLW)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x_BLW = x_BLW + self.out(attended.transpose(1, 2).flatten(2))
        mixed: Tensor = x_BLW + self.down(F.gelu(self.up(self.mlp_norm(x_BLW)), approximate="tanh"))
        return mixed


class FrozenBlock(Block):
    """A block of a frozen stream: another class, so that peers can wrap it by class."""


@dataclass(frozen=True)
class TransformerSize:
    """Of the causal transformer. batch x length: tokens of one rank's step."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    length: int

    def flops(self) -> float:
        """Three times the forward pass: products of every weight with every token, and causal attention."""
        weights = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        attention = self.layers * 2 * self.length * self.width  # 4 L W, half of it masked
        return 3.0 * self.batch * self.length * (2 * weights + attention)


class Transformer(nn.Module):
    """A causal language model, all of it trained."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, 4 * size.width, causal=True) for _ in range(size.layers)
        )
        self.norm = FloatNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        """tokens int64 [B, L + 1] -> mean cross entropy, 0-d."""
        tokens_BL = batch["tokens"]
        x = self.embedding(tokens_BL[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens_BL[:, 1:].flatten())


def transformer_problem(size: TransformerSize) -> Problem:
    def batch(generator: torch.Generator) -> Batch:
        return {"tokens": torch.randint(size.vocabulary, (size.batch, size.length + 1), generator=generator)}

    what = f"causal transformer, width {size.width}, {size.layers} layers, {size.batch} x {size.length} tokens a rank"
    return Problem(what, lambda: Transformer(size), batch, (Block,), size.flops(), size.batch)


# -- frozen and trained layers in turns --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamsSize:
    """Two streams of `depth` layers. width, mlp_width: of the frozen and of the trained one. batch: rows of a rank.

    length, horizon: tokens of the frozen and of the trained stream.
    """

    width: tuple[int, int]
    mlp_width: tuple[int, int]
    heads: int
    depth: int
    batch: int
    length: int
    horizon: int

    def flops(self) -> float:
        """Forward of the frozen stream, forward and backward of the trained one."""
        frozen, trained = (4 * w * w + 2 * w * m for w, m in zip(self.width, self.mlp_width, strict=True))
        read = self.width[0] * self.width[1]
        of_frozen = self.length * (2 * frozen + 4 * self.length * self.width[0])
        of_trained = 3 * self.horizon * (2 * (trained + read) + 4 * self.horizon * self.width[1])
        return float(self.batch * self.depth * (of_frozen + of_trained))


class TrainedLayer(nn.Module):
    """Reads the frozen stream, then a block."""

    def __init__(self, size: StreamsSize) -> None:
        super().__init__()
        self.read = nn.Linear(*size.width, bias=False)
        self.block = Block(size.width[1], size.heads, size.mlp_width[1], causal=False)

    def forward(self, x_BHW: Tensor, seen_BHW: Tensor) -> Tensor:
        out: Tensor = self.block(x_BHW + self.read(seen_BHW))
        return out


class Interleaved(nn.Module):
    """A frozen and a trained stream that are computed in turns, layer by layer, as public pi0.5 ports do."""

    def __init__(self, size: StreamsSize) -> None:
        super().__init__()
        frozen = (FrozenBlock(size.width[0], size.heads, size.mlp_width[0], causal=False) for _ in range(size.depth))
        self.frozen = nn.ModuleList(frozen).requires_grad_(False).to(torch.bfloat16)
        self.layers = nn.ModuleList(TrainedLayer(size) for _ in range(size.depth))
        self.head = nn.Linear(size.width[1], size.width[1])

    def forward(self, batch: Batch) -> Tensor:
        """observed [B, L, W0] and actions [B, H, W1] -> mean squared error, 0-d."""
        observed, actions = batch["observed"].to(torch.bfloat16), batch["actions"]
        x = torch.zeros_like(actions)
        for frozen, layer in zip(self.frozen, self.layers, strict=True):
            with torch.no_grad(), torch.autocast(observed.device.type, enabled=False):
                observed = frozen(observed)
            x = layer(x, observed[:, : x.shape[1]])
        return F.mse_loss(self.head(x).float(), actions)


def interleaved_problem(size: StreamsSize) -> Problem:
    def batch(generator: torch.Generator) -> Batch:
        observed = torch.randn(size.batch, size.length, size.width[0], generator=generator)
        return {
            "observed": observed,
            "actions": torch.randn(size.batch, size.horizon, size.width[1], generator=generator),
        }

    what = (
        f"{size.depth} frozen layers of width {size.width[0]} and {size.depth} trained ones of width {size.width[1]} "
        f"in turns, {size.batch} x {size.length} and {size.batch} x {size.horizon} tokens a rank"
    )
    units = (FrozenBlock, TrainedLayer)
    return Problem(what, lambda: Interleaved(size), batch, units, size.flops(), size.batch)


# -- pi0.5 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PI05Size:
    """config: "base" or "tiny". batch: rows of one rank. prompt: tokens of a row, all readable."""

    config: str
    batch: int
    prompt: int


class PI05Training(nn.Module):
    """pi0.5's own flow-matching loss on prepared tensors: no tokenizer, no image preparation."""

    def __init__(self, size: PI05Size) -> None:
        from soma_lightning.models.pi05.config import PI05Config
        from soma_lightning.models.pi05.model import PI05Model

        super().__init__()
        self.model = PI05Model(PI05Config.tiny() if size.config == "tiny" else PI05Config.base())
        self.model.prefix.to(torch.bfloat16)
        for p in self.model.expert.parameters():
            nn.init.normal_(p, std=EXPERT_STD)

    def forward(self, batch: Batch) -> Tensor:
        """See `_pi05_batch` -> mean squared error of the velocity, 0-d."""
        images = list(batch["images"].unbind(0))
        # Masks on the CPU: nothing waits for the device.
        readable = torch.ones(len(batch["tokens"]), dtype=torch.bool, device="cpu")
        prompt = torch.ones(batch["tokens"].shape, dtype=torch.bool, device="cpu")
        with torch.autocast(batch["tokens"].device.type, enabled=False):
            prefix = self.model.encode_prefix(images, [readable] * len(images), batch["tokens"], prompt)
        return self.model.flow_loss(prefix, batch["actions"], batch["noise"], batch["time"]).mean()


def pi05_problem(size: PI05Size) -> Problem:
    from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

    from soma_lightning.models.pi05.config import PI05Config
    from soma_lightning.models.pi05.expert import ActionExpert, ExpertLayer
    from soma_lightning.models.pi05.prefix import PI05Prefix, PrefixLayer

    config = PI05Config.tiny() if size.config == "tiny" else PI05Config.base()
    shape = (size.batch, config.chunk_size, config.max_action_dim)
    pixels = (len(config.cameras), size.batch, 3, config.image_resolution, config.image_resolution)

    def batch(generator: torch.Generator) -> Batch:
        return {
            "images": torch.rand(pixels, generator=generator) * 2 - 1,
            "tokens": torch.randint(config.vocab_size, (size.batch, size.prompt), generator=generator),
            "actions": torch.randn(shape, generator=generator),
            "noise": torch.randn(shape, generator=generator),
            "time": torch.rand(size.batch, generator=generator),
        }

    tokens = len(config.cameras) * config.image_tokens + size.prompt
    what = f"pi0.5 ({size.config}), frozen backbone, {size.batch} rows of {tokens} prefix tokens a rank"
    # The whole prefix and the whole expert too: their leftovers share no unit, because their dtypes differ.
    units = (SiglipEncoderLayer, PrefixLayer, ExpertLayer, PI05Prefix, ActionExpert)
    return Problem(what, lambda: PI05Training(size), batch, units, _pi05_flops(size), size.batch)


def _pi05_flops(size: PI05Size) -> float:
    """Forward of vision tower and language model, forward and backward of the expert, for one rank."""
    from soma_lightning.models.pi05.config import PI05Config

    config = PI05Config.tiny() if size.config == "tiny" else PI05Config.base()
    vision, language, expert = config.vision, config.language, config.expert
    image, cameras, horizon = config.image_tokens, len(config.cameras), config.chunk_size
    tokens = cameras * image + size.prompt
    layer = 4 * vision.width**2 + 2 * vision.width * vision.mlp_width
    ends = (3 * vision.patch_size**2 + language.width) * vision.width  # patch embedding and projector
    per_image_token = vision.depth * (2 * layer + 4 * image * vision.width) + 2 * ends
    heads = language.num_heads * language.head_dim
    keys = 2 * language.num_kv_heads * language.head_dim
    layer = language.width * (2 * heads + keys) + 3 * language.width * language.mlp_width
    # The last layer computes keys and values only.
    per_token = (language.depth - 1) * (2 * layer + 4 * tokens * heads) + 2 * language.width * keys
    heads = expert.num_heads * expert.head_dim
    layer = expert.width * (2 * heads + keys) + 3 * expert.width * expert.mlp_width
    per_action = expert.depth * (2 * layer + 4 * (tokens + horizon) * heads)
    modulation = 2 * (2 * expert.depth + 1) * 3 * expert.width**2  # once a row
    of_row = cameras * image * per_image_token + tokens * per_token + 3 * (horizon * per_action + modulation)
    return float(size.batch * of_row)


# -- sizes -------------------------------------------------------------------------------------------------------------

_TRANSFORMER = TransformerSize(width=2048, layers=20, heads=16, vocabulary=8192, batch=8, length=1024)
_STREAMS = StreamsSize(width=(2048, 1024), mlp_width=(23040, 4096), heads=8, depth=18, batch=8, length=256, horizon=64)

#: {size: {model: how its problem is made}}: made when asked for, because pi0.5 imports transformers.
MODELS: dict[str, dict[str, Callable[[], Problem]]] = {
    "full": {
        "pi05": lambda: pi05_problem(PI05Size("base", batch=32, prompt=64)),
        "interleaved": lambda: interleaved_problem(_STREAMS),
        "transformer": lambda: transformer_problem(_TRANSFORMER),
    },
    "tiny": {
        "pi05": lambda: pi05_problem(PI05Size("tiny", batch=2, prompt=8)),
        "interleaved": lambda: interleaved_problem(
            replace(_STREAMS, width=(64, 32), mlp_width=(128, 64), heads=4, depth=3, batch=2, length=8, horizon=4)
        ),
        "transformer": lambda: transformer_problem(
            replace(_TRANSFORMER, width=64, layers=3, heads=4, vocabulary=64, batch=2, length=16)
        ),
    },
}


def build(problem: Problem, device: torch.device) -> Module:
    """The network on `device`; the same weights for every rank and contender."""
    torch.manual_seed(0)
    with device:
        return problem.build()


def batches(problem: Problem, rank: int, device: torch.device) -> list[Batch]:
    """DISTINCT_BATCHES batches of one rank, on `device`."""
    made: list[Batch] = []
    for index in range(DISTINCT_BATCHES):
        generator = torch.Generator().manual_seed(1000 * rank + index)
        made.append({key: value.to(device) for key, value in problem.batch(generator).items()})
    return made
