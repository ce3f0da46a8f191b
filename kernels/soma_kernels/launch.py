"""How a kernel is launched with little work for the host: Triton's dispatch runs once for each set of constants.

Triton looks at every argument of every launch to find the compiled kernel, which takes longer than the launch. A
`Prepared` kernel remembers it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Prepared:
    """One `triton.jit` kernel with its constants, on a one-dimensional grid.

    constants: values of the kernel's last parameters. Every launch must pass arguments of the same types: tensors that
    start at a multiple of 16 bytes, integers that the kernel does not specialize. One object serves one device.
    num_stages: depth of software pipelines. max_registers: of one thread. None: Triton decides.
    fuse: whether products and sums may become one operation. Off by default, unless the kernel says `tl.fma`: the
    compiler's choice would differ between code for aligned and for unaligned memory, and so would the last bits.
    """

    def __init__(
        self,
        kernel: Any,
        constants: tuple[Any, ...],
        *,
        num_warps: int,
        num_stages: int | None = None,
        max_registers: int | None = None,
        fuse: bool = False,
    ) -> None:
        self._kernel = kernel
        self._constants = constants
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers, "enable_fp_fusion": fuse}
        self._options = {name: value for name, value in options.items() if value is not None}
        self._compiled: Any = None
        self._launch: Any = None
        self._handle: tuple[Any, ...] = ()
        self._hooks: Any = None
        self._stream: Any = None
        self._device = -1

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Starts `programs` programs on the current device and stream, or runs them in Triton's interpreter."""
        if self._launch is not None:
            stream = self._stream(self._device)
            if self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls:  # a profiler listens
                self._compiled[programs, 1, 1](*arguments, *self._constants, stream=stream)
            else:
                self._launch(programs, 1, 1, stream, *self._handle, None, None, None, *arguments, *self._constants)
            return
        launched = self._kernel[(programs, 1, 1)](*arguments, *self._constants, **self._options)
        if launched is not None:  # the interpreter compiles nothing
            from triton import knobs
            from triton.runtime import driver

            self._compiled, self._stream = launched, driver.active.get_current_stream
            self._device = torch.cuda.current_device()
            self._launch, self._handle = launched.run, (launched.function, launched.packed_metadata)
            self._hooks = knobs.runtime


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` the current one for launches inside the block; free of charge if it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
