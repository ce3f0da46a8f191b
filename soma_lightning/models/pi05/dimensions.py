"""How many dimensions have state and action? As many as their statistics."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from soma_lightning.contract import ACTION, STATE, Statistics

log = logging.getLogger(__name__)


def new_dim(name: str, before: int | None, stats: Mapping[str, np.ndarray] | None) -> int | None:
    """Length of a feature's statistics; without any, the dimension stays what it was."""
    dim = _dim_of(stats)
    dim = before if dim is None else dim
    if before not in (None, dim):
        log.warning("%s changes from %s to %s, the dimension of the new statistics", name, before, dim)
    return dim


def _dim_of(stats: Mapping[str, np.ndarray] | None) -> int | None:
    return next((len(value) for stat, value in (stats or {}).items() if stat != "count"), None)


def check_asked_dims(changes: Mapping[str, Any], statistics: Statistics) -> None:
    """Raises ValueError for a dimension that was asked for and that these statistics do not have."""
    for name, feature in (("action_dim", ACTION), ("state_dim", STATE)):
        asked = changes.get(name)
        dim = _dim_of(statistics.get(feature))
        if asked is not None and dim not in (None, asked):
            raise ValueError(
                f"{name}={asked} was asked for, but the statistics of {feature} have {dim} dimensions, and the "
                f"dimension follows them; pass statistics=... of the {asked}-dimensional data"
            )
