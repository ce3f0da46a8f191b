"""The registry: builders, configurations of every kind, extension modules in this process and in children."""

from __future__ import annotations

import argparse
import copy
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import soma_lightning
from soma_lightning.models import registry
from soma_lightning.models.registry import (
    ModelSettings,
    get_model,
    load_extensions,
    register_model,
    registered_models,
    subprocess_environment,
    torch_dtype,
)


class Built(nn.Module):
    def __init__(self, cfg: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.cfg, self.dtype = cfg, dtype


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A registry with the built-in models only, and a folder on the import path for extension modules."""
    monkeypatch.setattr(registry, "_models", dict(registry._BUILTIN))
    monkeypatch.setattr(registry, "_loaded_extensions", set())
    monkeypatch.delenv("SOMA_EXT_MODULE", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("ext_"):
            del sys.modules[name]


def write_extension(folder: Path, name: str, model_type: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(
        "from soma_lightning import register_model\nfrom torch import nn\ncalls = []\n"
        f"def register():\n    calls.append(1)\n    register_model({model_type!r}, lambda cfg, dtype: nn.Identity())\n"
    )


def test_a_registered_model_is_built_with_the_whole_configuration() -> None:
    register_model("mine", Built)
    model = get_model(
        {"model_type": "mine", "precision": "bf16", "model_path": "/p", "is_lora": True, "hidden_size": 64}
    )
    assert isinstance(model, Built)
    assert model.dtype == torch.bfloat16
    assert (model.cfg.model_path, model.cfg["hidden_size"], model.cfg.get("missing"), model.cfg.is_lora) == (
        "/p",
        64,
        None,
        True,
    )
    assert registered_models() == {"flow_mlp": "embodied", "mine": "embodied", "pi05": "embodied"}
    assert soma_lightning.get_model is get_model
    assert soma_lightning.register_model is register_model


@dataclass
class Nested:
    width: int = 3


@dataclass
class Config:
    model_type: str = "mine"
    precision: str = "fp16"
    sizes: dict[str, Any] = field(default_factory=lambda: {"depth": 2, "stages": [{"width": 1}]})
    nested: Nested = field(default_factory=Nested)


def test_configurations_of_every_kind() -> None:
    register_model("mine", Built)
    values = {"model_type": "mine", "precision": "fp16", "sizes": {"depth": 2, "stages": [{"width": 1}]}}
    namespace = argparse.Namespace(**{**values, "sizes": argparse.Namespace(**values["sizes"])})  # type: ignore[arg-type]
    for cfg in (values, Config(), namespace, types.SimpleNamespace(**values), ModelSettings(values)):
        model: Any = get_model(cfg)
        assert model.dtype == torch.float16
        assert model.cfg.sizes.depth == 2
        assert model.cfg.sizes.stages[0].width == 1
    assert get_model(Config()).cfg.nested.width == 3  # type: ignore[union-attr]
    for wrong in (["model_type"], "mine", None, Config):
        with pytest.raises(TypeError, match="get_model needs a dict, a dataclass, a Namespace or an OmegaConf node"):
            get_model(wrong)


def test_omegaconf_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        """Stands for a node: not a Mapping, readable only through OmegaConf."""

    class OmegaConf:
        is_config = staticmethod(lambda value: isinstance(value, Node))

        @staticmethod
        def to_container(node: Node, resolve: bool) -> dict[str, Any]:
            assert resolve
            return {"model_type": "mine", "sizes": {"depth": 2}}

    module: Any = types.ModuleType("omegaconf")
    module.OmegaConf = OmegaConf
    monkeypatch.setitem(sys.modules, "omegaconf", module)
    register_model("mine", Built)
    model: Any = get_model(Node())
    assert model.cfg.sizes.depth == 2


def test_real_omegaconf_nodes() -> None:
    import omegaconf

    register_model("mine", Built)
    cfg = omegaconf.OmegaConf.create({"model_type": "mine", "precision": "fp32", "width": 4, "twice": "${width}"})
    model: Any = get_model(cfg)
    assert model.cfg.twice == 4


def test_settings_name_what_is_missing_and_can_be_copied() -> None:
    settings = ModelSettings({"hidden_size": 4, "sizes": {"depth": 2}})
    with pytest.raises(
        AttributeError, match=r"no 'hiden_size'; did you mean 'hidden_size'\?; it has \['hidden_size', 'sizes'\]"
    ):
        settings.hiden_size  # noqa: B018
    for twin in (copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
        assert twin == settings
        assert twin.sizes.depth == 2


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        *((p, torch.float32) for p in ("fp32", "float32", "32", 32, "32-true", "FP32", torch.float32, "torch.float32")),
        *((p, torch.bfloat16) for p in ("bf16", "bfloat16", "bf16-true", torch.bfloat16)),
        *((p, torch.float16) for p in ("fp16", "float16", "half", "16", 16, "16-true")),
    ],
)
def test_precision(precision: object, dtype: torch.dtype) -> None:
    assert torch_dtype(precision) == dtype


@pytest.mark.parametrize("precision", ["fp8", "bf16-mixed", "", None, True, 64, torch.float64, torch.int32])
def test_unknown_precision_is_refused(precision: object) -> None:
    with pytest.raises(ValueError, match=r"unknown precision .*known: \['16'"):
        torch_dtype(precision)


def test_without_precision_the_builder_decides() -> None:
    register_model("mine", Built)
    assert get_model({"model_type": "mine"}).dtype is None
    assert get_model({"model_type": "mine", "precision": None}).dtype is None


def test_taken_names_need_force() -> None:
    register_model("mine", Built)
    with pytest.raises(ValueError, match="'mine' is registered already; pass force=True"):
        register_model("mine", Built)
    with pytest.raises(ValueError, match="'pi05' is registered already"):
        register_model("pi05", Built)
    register_model("pi05", Built, category="reasoning", force=True)
    assert isinstance(get_model({"model_type": "pi05"}), Built)
    assert registered_models()["pi05"] == "reasoning"


def test_wrong_registrations_and_requests() -> None:
    with pytest.raises(
        ValueError, match=r"category 'embodid' of 'mine' is unknown; known: \['embodied', 'reasoning'\]"
    ):
        register_model("mine", Built, category="embodid")
    with pytest.raises(ValueError, match="model_type must be a name"):
        register_model(" ", Built)
    with pytest.raises(TypeError, match="builder of 'mine' must be callable"):
        register_model("mine", "module:function")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"unknown model_type 'pi5'; did you mean 'pi05'\?; known: \['flow_mlp', 'pi05'\].*SOMA_EXT_MODULE",
    ):
        get_model({"model_type": "pi5"})
    with pytest.raises(ValueError, match=r"no model_type; known: \['flow_mlp', 'pi05'\]"):
        get_model({"precision": "fp32"})
    register_model("mine", lambda cfg, dtype: {})  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"builder of 'mine' must return an nn\.Module, got dict"):
        get_model({"model_type": "mine"})


def test_builtin_models_are_imported_only_when_built(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from soma_lightning.models.registry import registered_models; print(registered_models());"
        "print('transformers' in sys.modules, 'soma_lightning.models.pi05.policy' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["{'flow_mlp': 'embodied', 'pi05': 'embodied'}", "False False"]
    module: Any = types.ModuleType("soma_lightning.models.pi05.building")
    module.build_pi05 = Built
    monkeypatch.setitem(sys.modules, "soma_lightning.models.pi05.building", module)
    assert isinstance(get_model({"model_type": "pi05"}), Built)


def test_extensions_register_once(clean_registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_extension(clean_registry, "ext_one", "one")
    write_extension(clean_registry / "ext_package", "two", "two")
    (clean_registry / "ext_package" / "__init__.py").write_text("")
    (clean_registry / "ext_plain.py").write_text("loaded = True\n")
    monkeypatch.setenv("SOMA_EXT_MODULE", " ext_one, ext_package.two,,ext_plain ")
    assert load_extensions() == ("ext_one", "ext_package.two", "ext_plain")
    assert load_extensions() == ("ext_one", "ext_package.two", "ext_plain")
    assert isinstance(get_model({"model_type": "two"}), nn.Identity)
    assert sys.modules["ext_one"].calls == [1]
    assert sys.modules["ext_plain"].loaded
    assert set(registered_models()) == {"flow_mlp", "one", "pi05", "two"}


@pytest.mark.parametrize("name", ["ext_missing", "ext_missing.part"])
def test_a_missing_extension_is_one_clear_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMA_EXT_MODULE", name)
    for call in (load_extensions, subprocess_environment, registered_models, lambda: get_model({"model_type": "pi05"})):
        with pytest.raises(
            ImportError, match=rf"SOMA_EXT_MODULE names '{name}', but there is no module 'ext_missing'.*PYTHONPATH"
        ):
            call()


def test_errors_inside_an_extension_keep_their_type(clean_registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (clean_registry / "ext_broken.py").write_text("import package_that_does_not_exist\n")
    (clean_registry / "ext_raises.py").write_text("def register():\n    raise RuntimeError('no licence')\n")
    monkeypatch.setenv("SOMA_EXT_MODULE", "ext_broken")
    with pytest.raises(ModuleNotFoundError, match="package_that_does_not_exist") as error:
        load_extensions()
    assert error.value.__notes__ == ["while loading 'ext_broken', which SOMA_EXT_MODULE names"]
    monkeypatch.setenv("SOMA_EXT_MODULE", "ext_raises")
    for _ in range(2):  # a module that failed is tried again
        with pytest.raises(RuntimeError, match="no licence"):
            load_extensions()


def test_children_know_the_same_models(clean_registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert subprocess_environment() == {}
    write_extension(clean_registry, "ext_child", "from_child")
    monkeypatch.setenv("SOMA_EXT_MODULE", "ext_child")
    passed_on = subprocess_environment()
    assert passed_on == {"SOMA_EXT_MODULE": "ext_child"}
    monkeypatch.delenv("SOMA_EXT_MODULE")
    environment = {**os.environ, **passed_on, "PYTHONPATH": os.pathsep.join([str(clean_registry), *sys.path])}
    code = "from soma_lightning import get_model; print(type(get_model({'model_type': 'from_child'})).__name__)"
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "Identity"
