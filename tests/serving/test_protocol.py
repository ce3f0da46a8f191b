"""Messages are openpi-client's, and nothing in them is taken on trust."""

from __future__ import annotations

import pickle

import msgpack
import numpy as np
import pytest
from openpi_client import msgpack_numpy as openpi

from soma_lightning.serving.protocol import pack, unpack


def array(**changes: object) -> bytes:
    """A message with one array, some of its entries replaced."""
    entries = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    return msgpack.packb({"x": entries | {key.encode(): value for key, value in changes.items()}})


@pytest.mark.parametrize("dtype", ["|u1", "|b1", "<i8", ">f4", "<f2", "<f8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_arrays_go_both_ways_between_ours_and_the_clients(dtype: str, shape: tuple[int, ...]) -> None:
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    for read, packed in ((unpack, openpi.packb({"x": value})), (openpi.unpackb, pack({"x": value}))):
        found = read(packed)["x"]
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)


def test_scalars_and_columns_of_the_client_are_read() -> None:
    wide = np.arange(12.0).reshape(3, 4)[:, ::2]
    found = unpack(openpi.packb({"wide": wide, "number": np.float32(2.5), "text": np.str_("pick"), "none": None}))
    np.testing.assert_array_equal(found.pop("wide"), wide)
    assert found == {"number": 2.5, "text": "pick", "none": None}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "cannot be read"),
        (b"\xc1", "cannot be read: FormatError"),
        (pack({"x": 1})[:-1], "cannot be read"),
        (pack({"x": 1}) + b"\0", "extra data"),
        (msgpack.packb([1, 2]), "must be a map with string keys .one observation., got list"),
        (msgpack.packb({b"x": 1}), "string keys"),
        (msgpack.packb({1: 1}), "cannot be read"),
        (b"\x91" * 5000, "cannot be read: StackError"),
        (array(dtype="|O", data=pickle.dumps(print)), r"dtype '\|O' are refused"),
        (array(dtype="<f4,<f4"), "are refused"),
        (array(dtype="(9,9)f4"), "are refused"),
        (array(dtype="<c8"), "are refused"),
        (array(dtype="<f1"), "cannot be read"),
        (array(dtype=5), "are refused"),
        (array(shape=[3]), r"shape \[3\] and dtype <f4 needs 12 bytes, got 8"),
        (array(shape=[2**62, 2**62]), "needs"),
        (array(shape=[-2]), "whole numbers"),
        (array(shape="2"), "whole numbers"),
        (array(data=[0, 0]), "its data as bytes"),
        (msgpack.packb({"x": msgpack.ExtType(7, b"x")}), "extension type 7 is refused"),
    ],
)
def test_what_is_no_observation_is_one_value_error(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        unpack(data)


def test_what_has_no_place_in_a_message_is_not_sent() -> None:
    for value in (np.array([print]), np.zeros(1, "<c8"), {1, 2}):
        with pytest.raises(TypeError, match="no place in a message"):
            pack({"x": value})
