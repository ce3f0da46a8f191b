"""How LIBERO's raw images, and the gripper values of each policy, become what policy and simulator expect.

The state's axis-angle (without sign change) is `envs.base.state_of`, shared by all environments.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from soma_lightning.envs.base import require_known

#: Degrees by which the adapter turns the simulator's raw images; nothing after it may turn them again.
IMAGE_ROTATION = 180

#: "command": -1 opens, +1 closes, as the simulator takes it. "open_fraction": 0..1, 1 is open.
GripperConvention = Literal["command", "open_fraction"]
#: What each model family's decoded action says in its last component.
GRIPPER_OF_MODEL: dict[str, GripperConvention] = {
    "pi05": "command",
    "molmoact2": "command",
    "groot": "open_fraction",
}


def turn_half(raw: np.ndarray) -> np.ndarray:
    """`raw` uint8 [h, w, 3] turned by 180 degrees, as contiguous memory of its own.

    LIBERO's raw images are upside down; turned, they are upright and mirrored left to right, which is what the public
    data sets hold and the released policies see.
    """
    return np.ascontiguousarray(raw[::-1, ::-1])


def gripper_command(actions: np.ndarray, model_type: str) -> np.ndarray:
    """`actions` [..., 7] of a policy of `model_type` with the last component as LIBERO takes it; a copy.

    pi0.5 and MolmoAct2 predict the command itself. GR00T predicts how far open the gripper is, g in 0..1; the command
    is -sign(2 g - 1). ValueError for an unknown model type and for values outside 0..1 in the latter case.
    """
    require_known("model type", model_type, GRIPPER_OF_MODEL)
    commands = np.array(actions, copy=True)
    if GRIPPER_OF_MODEL[model_type] == "open_fraction":
        opening = commands[..., -1]
        if not ((opening >= -0.05) & (opening <= 1.05)).all():  # decoders overshoot a little
            raise ValueError(
                f"the gripper of a {model_type} action is how far open it is, 0..1; got {opening.min():.3g} to "
                f"{opening.max():.3g}; are these commands already?"
            )
        commands[..., -1] = -np.sign(2.0 * opening - 1.0)
    return commands
