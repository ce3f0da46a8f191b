"""How a kernel is launched with little work for the host: Triton's dispatch runs once for each configuration.

Triton looks at every argument of every launch to find the compiled kernel. Here the constants name it, because the
kernels of this package take the same argument types each time: whole allocations (16-byte aligned) and integers that
are not specialized.
"""

from __future__ import annotations

from typing import Any

import torch


class Launcher:
    """Launches one `triton.jit` kernel on a one-dimensional grid.

    The kernel's constants must be its last parameters. Not for kernels whose tensor arguments vary in dtype or
    alignment under the same constants.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], *, num_warps: int
    ) -> None:
        """Starts `programs` programs on the current CUDA device and stream, or runs them in Triton's interpreter."""
        on_cuda = torch.cuda.is_initialized()
        device = torch.cuda.current_device() if on_cuda else -1
        compiled = self._compiled.get((constants, num_warps, device))
        if compiled is not None:
            compiled[programs, 1, 1](*arguments, *constants, stream=torch.cuda.current_stream(device).cuda_stream)
            return
        compiled = self.kernel[(programs, 1, 1)](*arguments, *constants, num_warps=num_warps)
        if hasattr(compiled, "__getitem__"):  # the interpreter returns nothing
            self._compiled[constants, num_warps, device] = compiled
