"""Shared settings of the environment tests."""

from __future__ import annotations

import os

# Software rendering with one thread, as in the workers: the machine's cores are shared by several test processes.
os.environ.setdefault("LP_NUM_THREADS", "1")
