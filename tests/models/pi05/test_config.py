"""A pi0.5 configuration refuses values that are not of their declared type, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from soma_lightning.models.pi05.config import PI05Config, StreamConfig, VisionConfig


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, r"^dtype='float16' must be one of \['float32', 'bfloat16'\]$"),
        ({"prompt": "both"}, r"prompt='both' must be one of \['state', 'task'\]"),
        ({"loss_dims": None}, "loss_dims=None must be one of"),
        ({"zero_images": "maybe"}, "zero_images='maybe' must be bool"),
        ({"chunk_size": "8"}, "chunk_size='8' must be int"),
        ({"chunk_size": True}, "chunk_size=True must be int"),
        ({"action_dim": 1.5}, r"action_dim=1.5 must be int \| None"),
        ({"action_dim": 0}, "action_dim=0 must be at least 1"),
        ({"num_inference_steps": 0}, "num_inference_steps=0 must be at least 1"),
        ({"empty_cameras": -1}, "empty_cameras=-1 must be at least 0"),
        ({"time_beta_alpha": math.nan}, "time_beta_alpha=nan must be positive and finite"),
        ({"time_beta_beta": 0.0}, "time_beta_beta=0.0 must be positive"),
        ({"time_scale": 1.0}, "time_offset=0.001 and time_scale=1.0 put flow times into 0.001..1.001"),
        ({"time_scale": math.nan}, "time_scale=nan put flow times into 0.001..nan"),
        ({"time_scale": -0.1}, "time_scale=-0.1 put"),
        ({"time_offset": math.nan}, "time_offset=nan"),
        ({"time_offset": -0.1}, "time_offset=-0.1"),
        ({"min_period": 4.0}, "min_period=4.0 must be shorter than max_period=4.0"),
        ({"max_period": math.inf}, "max_period=inf must be positive and finite"),
        ({"time_scale": "a"}, "time_scale='a' must be float"),
        ({"cameras": "front"}, "cameras='front' must be tuple"),
        ({"cameras": [1]}, r"cameras=\(1,\) must be tuple"),
        ({"cameras": []}, "cameras is empty"),
        ({"vision": 3}, "vision=3 must be VisionConfig"),
        ({"vision": {"wdith": 3}}, r"vision has no \['wdith'\]; it has \['width'"),
        ({"expert": {}}, r"expert lacks \['width', 'mlp_width'\]"),
        ({"language": VisionConfig()}, "language=.* must be StreamConfig"),
        ({"expert": {"width": 0, "mlp_width": 1}}, "expert.width=0 must be at least 1"),
        ({"n_action_steps": 9}, "n_action_steps=9 must lie in 1..chunk_size=8"),
        ({"max_action_dim": 6, "action_dim": 7}, "action_dim=7 is larger than the model's max_action_dim=6"),
    ],
)
def test_values_of_another_kind(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PI05Config.tiny(**change)


def test_values_that_are_fine() -> None:
    config = PI05Config.tiny(
        time_scale=1,
        time_offset=0,
        cameras=["observation.images.front"],
        expert={"width": 32, "mlp_width": 64, "depth": 2, "head_dim": 32},
    )
    assert config.cameras == ("observation.images.front",)
    assert config.expert == StreamConfig(width=32, mlp_width=64, depth=2, head_dim=32)
    assert PI05Config.from_dict(config.to_dict()) == config
