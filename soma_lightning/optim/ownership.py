"""Who counts a gradient in the global norm when several processes hold it, and how their counts become one.

One process counts everything. A strategy that divides parameters gives `FusedAdamW.ownership` an object that knows
better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Ownership(Protocol):
    """What `FusedAdamW` asks when its parameters live in several processes."""

    def counted(self, params: Sequence[Tensor]) -> Sequence[bool]:
        """For each parameter: does this process add the squares of its local gradient to the global norm?"""

    def reduce(self, vector: Tensor, norm_type: float) -> Tensor:
        """The statistics vector of `soma_kernels.optim.reference.GradStats` over all processes, a new tensor.

        One collective for norm_type 2.0 (a sum). The host does not wait for it.
        """
