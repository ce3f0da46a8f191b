"""The fused frozen prefix, in bf16 and fp8, against stock modules in float64; what may run fused, and what may not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import soma_lightning.models.pi05.frozen as frozen
from soma_kernels.testing import relative_rms
from soma_lightning import frozen_layers
from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.model import PI05Model
from soma_lightning.models.pi05.prefix import PrefixCache


def make_model(**changes: object) -> PI05Model:
    torch.manual_seed(0)
    model = PI05Model(PI05Config.tiny(**{"dtype": "bfloat16", "islands": "openpi", **changes}))  # type: ignore[arg-type]
    for name, p in model.prefix.named_parameters():
        if "norm" in name or "bias" in name:
            p.data += 0.2 * torch.randn_like(p)
    return model


def encoded(
    model: PI05Model, *, compact: bool = True, prompts: tuple[int, ...] = (9, 32, 4), cameras: int = 2
) -> PrefixCache:
    """prompts: tokens of each row. The second row lacks the second camera."""
    draw = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    rows, side = len(prompts), model.config.image_resolution
    images = [torch.rand(rows, 3, side, side, generator=draw).to(device) * 2 - 1 for _ in range(cameras)]
    seen = [torch.ones(rows, dtype=torch.bool) for _ in range(cameras)]
    seen[-1][1:2] = rows == 1
    tokens = torch.randint(5, 600, (rows, 32), generator=draw).to(device)
    return model.encode_prefix(images, seen, tokens, torch.arange(32)[None] < torch.tensor(prompts)[:, None], compact)


def readable(prefix: PrefixCache) -> Tensor:
    """Keys and values of readable tokens, [tokens, Hkv, 2 * layers, D]."""
    assert prefix.mask is not None
    return torch.stack([*prefix.keys, *prefix.values]).double().permute(1, 3, 2, 0, 4)[prefix.mask]


def truth(model: PI05Model) -> Tensor:
    return readable(encoded(copy.deepcopy(model).double()))


@pytest.fixture
def fused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen layers run fused on the CPU, too, in plain torch."""
    monkeypatch.setattr(frozen, "has_kernels", lambda device: True)


@pytest.mark.parametrize("compact", [True, False])
def test_fused_layers_are_as_near_to_float64_as_stock_ones(fused_on_cpu, compact):
    model = make_model()
    wanted = readable(encoded(copy.deepcopy(model).double(), compact=compact))
    fused = encoded(model, compact=compact)
    model.prefix.fuse_frozen = False
    stock = encoded(model, compact=compact)
    assert fused.streams is not None
    assert stock.streams is None
    assert relative_rms(readable(fused), wanted) <= 1.2 * relative_rms(readable(stock), wanted)


def test_fused_kernels_in_the_interpreter(fused_on_cpu, monkeypatch):
    model, small = make_model(), {"prompts": (2, 3), "cameras": 1}
    wanted = readable(encoded(copy.deepcopy(model).double(), **small))
    plain = relative_rms(readable(encoded(model, **small)), wanted)
    monkeypatch.setattr(frozen_layers, "has_kernels", lambda device: True)
    assert relative_rms(readable(encoded(model, **small)), wanted) <= 1.1 * plain


@pytest.mark.gpu
def test_fused_layers_on_a_gpu():
    model = make_model()
    wanted = truth(model)
    model.cuda()
    fused = encoded(model)
    assert fused.streams is not None
    assert model.prefix.path() == "vision: fused (Triton kernels), language: fused (Triton kernels)"
    model.prefix.fuse_frozen = False
    stock = relative_rms(readable(encoded(model)).cpu(), wanted)
    assert relative_rms(readable(fused).cpu(), wanted) <= 1.2 * stock


@pytest.mark.parametrize("fused", [True, False])
def test_fp8_is_as_near_as_three_bits_allow(device, fused):
    model = make_model().to(device)
    wanted, before = truth(model), model.prefix.state_dict()
    bytes_before = sum(x.nbytes for x in before.values())
    model.quantize_frozen()
    model.prefix.fuse_frozen = fused
    model.check_dtypes()
    prefix = encoded(model)
    assert prefix.keys[0].dtype == torch.bfloat16
    assert (prefix.streams is not None) == fused
    assert 0.01 < relative_rms(readable(prefix), wanted) < 0.12
    after = model.prefix.state_dict()
    assert sum(x.nbytes for x in after.values()) < 0.8 * bytes_before  # norms, patches and positions stay
    assert not [name for name, x in after.items() if x.dtype == torch.bfloat16 and x.dim() > 1]
    assert "stock" not in model.prefix.path() or not fused


def test_velocity_and_loss_of_fp8_stay_near_bf16():
    model = make_model()
    for p in model.expert.parameters():
        nn.init.normal_(p, std=0.05)
    config, draw = model.config, torch.Generator().manual_seed(2)
    actions = torch.randn(3, config.chunk_size, config.max_action_dim, generator=draw)
    noise = torch.randn(actions.shape, generator=draw)
    time = torch.rand(3, generator=draw)
    with torch.no_grad():
        velocity, loss = (
            model.velocity(encoded(model), noise, time),
            model.flow_loss(encoded(model), actions, noise, time),
        )
        model.quantize_frozen()
        rough, rough_loss = (
            model.velocity(encoded(model), noise, time),
            model.flow_loss(encoded(model), actions, noise, time),
        )
    assert 0 < relative_rms(rough, velocity) < 0.05
    assert abs(float(rough_loss.mean() / loss.mean()) - 1) < 0.02


def test_products_share_their_memory_after_the_first_pass(fused_on_cpu):
    model = make_model()
    attn = model.prefix.paligemma.language_model.layers[0].self_attn
    before = {name: x.clone() for name, x in model.state_dict().items()}
    encoded(model)
    assert attn.k_proj.weight.data_ptr() == attn.q_proj.weight.data_ptr() + attn.q_proj.weight.nbytes
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    attn.q_proj.weight.data = attn.q_proj.weight.data.clone() * 2  # moved, as module.to(device) does, and changed
    wanted = truth(model)
    assert relative_rms(readable(encoded(model)), wanted) < 0.02


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"trainable": "all"}, "a part of the prefix trains"),
        ({"dtype": "float32"}, "their products are in fp32"),
        ({"islands": "lerobot"}, "vision: stock modules (their products are in fp32), language: fused (torch)"),
    ],
)
def test_what_cannot_run_fused_runs_as_stock_modules_and_says_so(fused_on_cpu, changes, why):
    model = make_model(**changes)
    assert why in model.prefix.path()
    assert encoded(model).keys[0].isfinite().any()


def test_hooks_and_other_layers_are_called(fused_on_cpu):
    class Adapter(nn.Linear):
        pass

    model = make_model()
    calls = []
    handle = model.prefix.paligemma.language_model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    encoded(model)
    assert calls
    assert "language: stock modules (they have hooks)" in model.prefix.path()
    handle.remove()
    mlp = model.prefix.paligemma.language_model.layers[0].mlp
    mlp.up_proj = Adapter(mlp.up_proj.in_features, mlp.up_proj.out_features, bias=False).requires_grad_(False)
    assert "language: stock modules (their products are Adapter, Linear)" in model.prefix.path()


def test_without_kernels_the_report_says_why():
    assert make_model().prefix.path() == (
        "vision: stock modules (there are no kernels for cpu), language: stock modules (there are no kernels for cpu)"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainable": "all"}, "trainable='expert'"),
        ({"dtype": "float32"}, "dtype='bfloat16'"),
        ({"islands": "lerobot"}, "islands='openpi'"),
    ],
)
def test_what_cannot_be_quantized_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_model(**changes).quantize_frozen()
