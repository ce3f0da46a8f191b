"""How does a message of the openpi websocket protocol look: msgpack with NumPy arrays in it?

As `openpi-client` 0.1.2 packs them. An array is a map of byte-string keys: `__ndarray__` true, `data` bytes in C order,
`dtype` as NumPy's array interface spells it, `shape`. A NumPy scalar is the map `__npgeneric__` true, `data`, `dtype`.
Only plain numbers are read: object, structured and complex dtypes are refused, and nothing is ever unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

ARRAY, SCALAR = b"__ndarray__", b"__npgeneric__"
_PLAIN_DTYPE = re.compile(r"[<>|=]?[biuf][1248]")


def pack(message: Mapping[str, Any]) -> bytes:
    """The message as bytes. Values: what msgpack knows, and arrays of plain numbers (TypeError for anything else)."""
    packed: bytes = msgpack.packb(message, default=_as_map)
    return packed


def unpack(data: bytes) -> dict[str, Any]:
    """The message in `data`, a map with string keys; arrays are read-only views of it in the dtype they were sent in.

    Raises ValueError for bytes that are no msgpack, for another message than a map, and for arrays of objects or whose
    data do not fill their shape.
    """
    try:
        message = msgpack.unpackb(data, object_hook=_from_map, ext_hook=_refuse_extension)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"the message cannot be read: {str(error) or type(error).__name__}") from error
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise ValueError(
            f"a message must be a map with string keys (one observation), got {type(message).__name__}"
            + (f" with the keys {list(message)!r:.80}" if isinstance(message, dict) else "")
        )
    return message


def _as_map(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, np.ndarray) or not _PLAIN_DTYPE.fullmatch(value.dtype.str):
        raise TypeError(f"{type(value).__name__} {getattr(value, 'dtype', '')} has no place in a message")
    return {ARRAY: True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def _from_map(value: dict[Any, Any]) -> Any:
    if ARRAY in value:
        return _array(value)
    return value.get(b"data") if SCALAR in value else value


def _array(value: Mapping[bytes, Any]) -> np.ndarray:
    data, name, shape = (value.get(key) for key in (b"data", b"dtype", b"shape"))
    if not isinstance(name, str) or not _PLAIN_DTYPE.fullmatch(name):
        raise ValueError(f"arrays of dtype {name!r:.40} are refused; send integers, floats or booleans")
    if not isinstance(data, bytes) or not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(
            f"an array needs its data as bytes and its shape as whole numbers, got the shape {shape!r:.40}"
        )
    dtype, count = np.dtype(name), 1
    for length in shape:  # Python's integers do not overflow
        count *= length
    if count * dtype.itemsize != len(data):
        raise ValueError(
            f"an array of shape {shape} and dtype {name} needs {count * dtype.itemsize} bytes, got {len(data)}"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"msgpack's extension type {code} is refused; arrays travel as maps")
