"""What can this machine do for a kernel? Triton, its interpreter, multiprocessors, shared memory; asked once, lazily.

Importing this module asks nothing and never imports Triton.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch

#: What every kernel reads and writes; fp64 goes through the references.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about one device; counts are 0 where the device has no such thing.

    triton: kernels can run here, compiled or interpreted. interpreter: they run in Triton's interpreter.
    capability: CUDA compute capability, such as (9, 0). multiprocessors: streaming multiprocessors.
    shared_memory: bytes that one block can use. memory: bytes of device memory.
    """

    device: str
    triton: bool
    interpreter: bool
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    shared_memory: int = 0
    memory: int = 0


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """True when the triton package can be imported; it is not imported to find out."""
    return find_spec("triton") is not None


@lru_cache(maxsize=1)
def is_interpreter() -> bool:
    """True when TRITON_INTERPRET=1 asks for the interpreter, which runs kernels on the CPU.

    Triton reads the variable when it is imported, so the first answer holds for the whole process.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def device_facts(device: torch.device | str) -> DeviceFacts:
    """Facts about `device`; a CUDA device without index means the current one. Asked once for each device."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _device_facts(device)


@lru_cache
def _device_facts(device: torch.device) -> DeviceFacts:
    interpreter = has_triton() and is_interpreter()
    if device.type != "cuda":
        return DeviceFacts(str(device), triton=interpreter and device.type == "cpu", interpreter=interpreter)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        device=str(device),
        triton=has_triton(),
        interpreter=interpreter,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        # The opt-in limit is what a Triton kernel may use; older builds of torch report only the default one.
        shared_memory=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        memory=properties.total_memory,
    )
