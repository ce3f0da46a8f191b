"""Are tensors read and written one at a time, as the public libraries read and write them?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from soma_lightning.models.tensor_files import TensorFile, write_safetensors


def some_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "b.bf16": torch.randn(3, 5).to(torch.bfloat16),
        "z.fp32": torch.randn(4),
        "a.fp32": torch.randn(2, 3, 4),
        "one": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
    }


def same(read: dict[str, Tensor], written: dict[str, Tensor]) -> bool:
    return set(read) == set(written) and all(
        read[name].dtype == value.dtype and torch.equal(read[name], value) for name, value in written.items()
    )


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = some_tensors()
    tensors["view"] = torch.randn(6, 4).T
    tensors["expanded"] = torch.tensor(3.0).expand(5, 2)
    write_safetensors(tmp_path / "ours.safetensors", tensors)
    assert same(load_file(tmp_path / "ours.safetensors"), tensors)


def test_the_file_is_the_librarys_byte_by_byte(tmp_path: Path) -> None:
    tensors = {name: value for name, value in some_tensors().items() if name != "flags"}
    write_safetensors(tmp_path / "ours.safetensors", tensors)
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot hold {'c': torch\.complex64}"):
        write_safetensors(tmp_path / "x.safetensors", {"c": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("default_device", ["cpu", "meta"])
def test_reading(tmp_path: Path, suffix: str, default_device: str) -> None:
    tensors, file = some_tensors(), tmp_path / f"x{suffix}"
    if suffix == ".pt":
        torch.save(tensors, file)
    else:
        save_file(tensors, file)
    with torch.device(default_device):
        found = TensorFile(file)
        assert {name: found.shapes[name] for name in tensors} == {n: tuple(t.shape) for n, t in tensors.items()}
        assert found.dtypes == {name: value.dtype for name, value in tensors.items()}
        assert same({name: found.read(name).clone() for name in found.shapes}, tensors)  # mapped afresh on the way


class Surprise:
    """Its unpickling would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("this ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"w": torch.ones(2), "x": Surprise()},
            r"holds more than tensors, .*run code of the file \(it asks for print\);",
        ),
        ({"w": torch.ones(2), "step": 3}, r"no plain state dict: step \(int\)"),
        ([torch.ones(2)], "holds a list; a state dict"),
        ({7: torch.ones(2)}, r"no plain state dict: 7 \(its name is of type int\)"),
        ({"w": torch.ones(2).to_sparse()}, r"no plain state dict: w \(no dense tensor\)"),
        ({"w": torch.ones(2, device="meta")}, r"no plain state dict: w \(without values, on the meta device\)"),
    ],
)
def test_what_is_no_state_dict_is_refused(
    tmp_path: Path, content: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=message):
        TensorFile(tmp_path / "x.pt")
    assert "this ran" not in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["cut short", "garbage", "empty", "old format"])
def test_damaged_files_of_torch_save_are_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "x.pt"
    torch.save(some_tensors(), file, _use_new_zipfile_serialization=damage != "old format")
    content = file.read_bytes()
    if damage != "old format":
        file.write_bytes({"cut short": content[:-100], "garbage": b"x" * 500, "empty": b""}[damage])
    with pytest.raises(ValueError, match="is no readable file of torch.save") as error:
        TensorFile(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("error", [KeyError(7), AttributeError("'str' object has no attribute 'dtype'"), IndexError()])
def test_a_damaged_pickle_may_fail_in_any_way(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(ValueError, match=r"x\.pt is no readable file of torch.save"):
        TensorFile(tmp_path / "x.pt")


def test_a_file_is_rewritten_from_its_own_mapping_and_survives_an_error(tmp_path: Path) -> None:
    file, tensors = tmp_path / "x.safetensors", some_tensors()
    write_safetensors(file, tensors)
    mapped = TensorFile(file)
    write_safetensors(file, {name: mapped.read(name) for name in tensors})
    assert same(load_file(file), tensors)
    with pytest.raises(NotImplementedError):
        write_safetensors(file, {**tensors, "without values": torch.ones(2, device="meta")})
    assert same(load_file(file), tensors)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
