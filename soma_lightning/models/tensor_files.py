"""How do tensors get from a file to where they are used, and back, one at a time? safetensors, and torch's zip files.

The files of these models are as large as a machine's memory. Reading maps the file, so that what is not asked for is
never touched; writing needs the values of one tensor at a time, wherever the others are.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

#: dtype -> its name in a safetensors header.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFile:
    """Named tensors of a `.safetensors` file, or of a state dict that torch.save wrote, without reading the file.

    shapes, dtypes: by name, in the order of the file.
    Raises ValueError naming the file when it is damaged, holds something else than tensors, or needs code to be run
    (files of torch.save are read with weights_only=True).
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._opened: Any = None
        self._unread = 0
        self._open()
        largest = 0
        for name in self._names():
            tensor = self._get(name)  # maps: no value is read
            self.shapes[name], self.dtypes[name] = tuple(tensor.shape), tensor.dtype
            largest = max(largest, tensor.nbytes)
        self._budget = self._unread = largest

    def read(self, name: str) -> Tensor:
        """The mapped values of one tensor on the CPU: use them, or a part of them, before the next call, and let go.

        Pages that were read stay in this process's memory until the file is unmapped, so it is mapped afresh whenever
        as much as the largest tensor was read.
        """
        tensor = self._get(name)
        if tensor.nbytes > self._unread:
            del tensor
            self._opened = None
            self._open()
            self._unread = self._budget
            tensor = self._get(name)
        self._unread -= tensor.nbytes
        return tensor

    def _names(self) -> list[str]:
        if isinstance(self._opened, Mapping):
            return list(self._opened)
        return list(self._opened.offset_keys())

    def _get(self, name: str) -> Tensor:
        if isinstance(self._opened, Mapping):
            found: Tensor = self._opened[name]
        else:
            with torch.device("cpu"):  # the reader would follow the caller's default device, and copy
                found = self._opened.get_tensor(name)
        return found

    def _open(self) -> None:
        is_safetensors = self.file.suffix == ".safetensors"
        self._opened = _mapped_safetensors(self.file) if is_safetensors else _mapped_state_dict(self.file)


def _mapped_safetensors(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(file, framework="pt")
        return opened.__enter__()  # unmapped when nobody holds it or a tensor of it
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no readable safetensors file ({error}); it may be damaged or cut short") from error


def _mapped_state_dict(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than tensors, and reading that would run code of the file ({load_failure(error)}); "
            "save its state dict alone: torch.save(model.state_dict(), path)"
        ) from error
    except Exception as error:  # of every kind: a damaged pickle may ask for anything
        raise ValueError(
            f"{file} is no readable file of torch.save ({load_failure(error)}); it may be damaged, cut short or of the "
            "old format"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; a state dict (name -> tensor) is needed")
    others = [f"{name} ({why})" for name, value in content.items() if (why := _why_unusable(name, value))]
    if others:
        raise ValueError(f"{file} is no plain state dict: {', '.join(others[:5])} hold no usable tensor")
    return content


def load_failure(error: Exception) -> str:
    """Why torch.load(weights_only=True) failed, in one line and without its advice to trust the file."""
    asked = re.search(r"GLOBAL (\S+)", str(error))
    if asked:
        return f"it asks for {asked[1]}"
    first_line = next(iter(str(error).splitlines()), "")
    return first_line.partition(" This file can still be loaded")[0] or type(error).__name__


def _why_unusable(name: object, value: object) -> str | None:
    """What an entry of a state dict is, if it is no tensor with values under a name."""
    if not isinstance(name, str):
        return f"its name is of type {type(name).__name__}"
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested or value.is_quantized or value.layout != torch.strided:
        return "no dense tensor"
    return "without values, on the meta device" if value.is_meta else None


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes `tensors` from wherever they are, each copied to the CPU when its turn comes; dtypes are kept.

    The file appears whole or not at all: an earlier one, from which `tensors` may be mapped, stays until then. DTensors
    are gathered, one at a time: the other ranks call `gather_in_turn` with theirs meanwhile.
    Raises ValueError for a dtype that the format does not name here.
    """
    unknown = {name: value.dtype for name, value in tensors.items() if value.dtype not in _NAMES}
    if unknown:
        raise ValueError(f"{file} cannot hold {unknown}; known dtypes: {list(_NAMES)}")
    order = _order(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        value = tensors[name]
        begin, end = end, end + prod(value.shape) * value.dtype.itemsize
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with aside.open("wb") as out:
            out.write(len(text).to_bytes(8, "little"))
            out.write(text)
            for name in order:
                values = whole(tensors[name]).cpu().contiguous()
                out.write(values.reshape(-1).view(torch.uint8).numpy().data)
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


def gather_in_turn(tensors: Mapping[str, Tensor]) -> None:
    """This rank's part in `write_safetensors` of the same tensors on another rank."""
    for name in _order(tensors):
        whole(tensors[name])


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Wide elements first, as the format's own writer has it: then every tensor lies on a multiple of its element."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def whole(tensor: Tensor) -> Tensor:
    """The tensor, of a DTensor gathered from all ranks, which call this together; detached."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
