"""Saving and loading a policy: both layouts, what lies beside the weights, folders that hold something else."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from soma_lightning.models import PI05Config, PI05Policy
from soma_lightning.models.pi05 import folder as checkpoint_folder


def draws(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(rows, 8, 7, generator=generator), torch.rand(rows, generator=generator)


@pytest.mark.parametrize("layout", ["lerobot", "openpi"])
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "prompt": "task", "normalization": "mean_std"}])
def test_save_and_load_are_bit_equal(make_policy, make_batch, tmp_path, layout, changes):
    policy = make_policy(**changes)
    policy.save_pretrained(tmp_path / "p", layout=layout)
    loaded = PI05Policy.from_pretrained(tmp_path / "p")
    assert loaded.config == policy.config
    ours, theirs = policy.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) and ours[k].dtype == theirs[k].dtype for k in ours)
    kept = ("mean", "std", "q01", "q99") if layout == "openpi" else ("mean", "std", "min", "max", "q01", "q99", "count")
    for feature, stats in loaded.statistics.items():
        assert set(stats) == set(kept)
        assert all(np.array_equal(stats[name], policy.statistics[feature][name]) for name in kept)
    noise, time = draws(3)
    batch = make_batch()
    assert torch.equal(loaded.sample_actions(batch, noise), policy.sample_actions(batch, noise))
    first, second = (p.sft_forward(batch, noise=noise, time=time)["loss"] for p in (policy, loaded))
    assert torch.equal(first, second)
    assert loaded.backbone_hash() == policy.backbone_hash()
    assert [n for n, p in loaded.named_parameters() if p.requires_grad] == policy_trainable(policy)


def policy_trainable(policy: PI05Policy) -> list[str]:
    return [name for name, p in policy.named_parameters() if p.requires_grad]


def test_loading_takes_overrides_and_says_where_statistics_come_from(make_policy, make_statistics, tmp_path):
    make_policy().save_pretrained(tmp_path / "p")
    loaded = PI05Policy.from_pretrained(
        tmp_path / "p", dtype="bfloat16", trainable="all", changes={"n_action_steps": 2, "zero_images": True}
    )
    assert (loaded.config.dtype, loaded.config.trainable, loaded.config.n_action_steps) == ("bfloat16", "all", 2)
    assert loaded.config.zero_images
    assert loaded.statistics_source == "checkpoint (statistics.json)"
    assert loaded.model.expert.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    other = PI05Policy.from_pretrained(tmp_path / "p", statistics=make_statistics(action_dim=3))
    assert (other.config.action_dim, other.statistics_source) == (3, "given")
    with pytest.raises(ValueError, match=r"no configuration field 'n_action_step'; nearest: \['n_action_steps'"):
        PI05Policy.from_pretrained(tmp_path / "p", changes={"n_action_step": 2})
    with pytest.raises(ValueError, match=r"\['dtype'\] are given both"):
        PI05Policy.from_pretrained(tmp_path / "p", dtype="float32", changes={"dtype": "float32"})


@pytest.mark.parametrize("asked", [{"action_dim": 5}, {"changes": {"action_dim": 5}}, {"changes": {"state_dim": 5}}])
def test_a_dimension_that_the_statistics_do_not_have_is_refused(make_policy, asked, tmp_path):
    make_policy().save_pretrained(tmp_path / "p")
    with pytest.raises(ValueError, match="_dim=5 was asked for, but the statistics of .* dimensions"):
        PI05Policy.from_pretrained(tmp_path / "p", **asked)


def test_a_saved_tokenizer_is_the_one_that_is_loaded(make_policy, tmp_path):
    policy = make_policy()
    policy.save_pretrained(tmp_path / "p")
    loaded = PI05Policy.from_pretrained(tmp_path / "p")
    assert loaded.processor.prompts.number_token_ids == policy.processor.prompts.number_token_ids
    (tmp_path / "p" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        PI05Policy.from_pretrained(tmp_path / "p")


def test_checkpoint_without_statistics(tmp_path, make_statistics):
    PI05Policy(PI05Config.tiny()).save_pretrained(tmp_path / "p")
    loaded = PI05Policy.from_pretrained(tmp_path / "p")
    assert loaded.statistics is None
    loaded.set_statistics(make_statistics())
    loaded.processor.prepare()


def test_lerobot_pipelines_are_written_where_lerobot_agrees(make_policy, tmp_path):
    policy = make_policy()
    policy.processor.tokenizer = policy.processor.prompts.tokenizer
    policy.config = replace(policy.config, tokenizer="google/paligemma-3b-pt-224")
    policy.save_pretrained(tmp_path / "p")
    pre, post = (json.loads((tmp_path / "p" / f"policy_{x}processor.json").read_text()) for x in ("pre", "post"))
    assert [step["registry_name"] for step in pre["steps"]] == [
        "rename_observations_processor",
        "to_batch_processor",
        "relative_actions_processor",
        "normalizer_processor",
        "pi05_prepare_state_tokenizer_processor_step",
        "tokenizer_processor",
        "device_processor",
    ]
    assert pre["steps"][5]["config"]["tokenizer_name"] == "google/paligemma-3b-pt-224"
    assert pre["steps"][3]["config"]["norm_map"] == {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    assert post["steps"][0]["state_file"] == "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    tensors = load_file(tmp_path / "p" / "policy_preprocessor_step_3_normalizer_processor.safetensors")
    expected = policy.statistics["observation.state"]["q01"].astype(np.float32)
    assert np.array_equal(tensors["observation.state.q01"].numpy(), expected)
    # without our own file, lerobot's are read: float32 of the same values
    (tmp_path / "p" / "statistics.json").unlink()
    statistics, source = checkpoint_folder.find_statistics(tmp_path / "p")
    assert source == "policy_preprocessor_step_3_normalizer_processor.safetensors"
    assert np.array_equal(statistics["observation.state"]["q01"], expected)

    other = make_policy(prompt="task")
    other.save_pretrained(tmp_path / "task")
    assert not (tmp_path / "task" / "policy_preprocessor.json").exists()


def test_damaged_side_files_are_named(make_policy, tmp_path):
    policy = make_policy()
    policy.save_pretrained(tmp_path / "p")
    (tmp_path / "p" / "statistics.json").write_text("{")
    with pytest.raises(ValueError, match=r"statistics\.json is no valid JSON"):
        PI05Policy.from_pretrained(tmp_path / "p")
    (tmp_path / "p" / "statistics.json").unlink()
    pipeline = {"steps": [{"registry_name": "normalizer_processor", "state_file": "gone.safetensors"}]}
    (tmp_path / "p" / "policy_preprocessor.json").write_text(json.dumps(pipeline))
    with pytest.raises(ValueError, match=r"gone\.safetensors, named by policy_preprocessor\.json, cannot be read"):
        PI05Policy.from_pretrained(tmp_path / "p")
    (tmp_path / "p" / "policy_preprocessor.json").write_text("[]")
    with pytest.raises(ValueError, match=r"policy_preprocessor\.json is not one of lerobot's pipelines"):
        PI05Policy.from_pretrained(tmp_path / "p")


def test_several_openpi_assets_must_be_chosen_from(make_policy, make_statistics, tmp_path):
    make_policy().save_pretrained(tmp_path / "p", layout="openpi")
    assert PI05Policy.from_pretrained(tmp_path / "p").statistics_source == "checkpoint (assets/soma/norm_stats.json)"
    (tmp_path / "p" / "assets" / "other").mkdir()
    source = tmp_path / "p" / "assets" / "soma" / "norm_stats.json"
    (tmp_path / "p" / "assets" / "other" / "norm_stats.json").write_text(source.read_text())
    with pytest.raises(ValueError, match=r"several statistics .*other/norm_stats\.json.*pass the right one"):
        PI05Policy.from_pretrained(tmp_path / "p")
    assert PI05Policy.from_pretrained(tmp_path / "p", statistics=make_statistics()).statistics_source == "given"


def test_saving_replaces_a_checkpoint_but_nothing_else(make_policy, tmp_path):
    policy = make_policy()
    policy.save_pretrained(tmp_path / "p", layout="openpi")
    policy.save_pretrained(tmp_path / "p", layout="lerobot")
    assert not (tmp_path / "p" / "assets").exists()
    (tmp_path / "p" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds \['notes.txt'\] which is no part of a pi0.5 checkpoint"):
        policy.save_pretrained(tmp_path / "p")
    assert (tmp_path / "p" / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="layout must be 'lerobot' or 'openpi', got 'onnx'"):
        policy.save_pretrained(tmp_path / "q", layout="onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


def test_the_working_directory_is_not_replaced_under_the_program(make_policy, tmp_path, monkeypatch):
    make_policy().save_pretrained(tmp_path / "p")
    monkeypatch.chdir(tmp_path / "p")
    for folder in (".", tmp_path / "p"):
        with pytest.raises(FileExistsError, match=r"p is the working directory and cannot be replaced"):
            make_policy().save_pretrained(folder)
    PI05Policy.from_pretrained(".")


def test_a_link_to_a_folder_stays_a_link(make_policy, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    make_policy().save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    PI05Policy.from_pretrained(tmp_path / "real")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_an_interrupted_save_leaves_the_old_checkpoint(make_policy, tmp_path, monkeypatch):
    policy = make_policy()
    policy.save_pretrained(tmp_path / "p")
    before = {path.name: path.read_bytes() for path in (tmp_path / "p").iterdir()}
    monkeypatch.setattr(
        "soma_lightning.models.pi05.policy.save_weights", lambda *_, **__: (_ for _ in ()).throw(OSError("disk"))
    )
    with pytest.raises(OSError, match="disk"):
        policy.save_pretrained(tmp_path / "p")
    assert {path.name: path.read_bytes() for path in (tmp_path / "p").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_checkpoints_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint folder .*nowhere"):
        PI05Policy.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)  # the relative path looks like a hub id
    with pytest.raises(NotADirectoryError, match=r"owner/model\.safetensors is a file; pass the folder .*/owner$"):
        PI05Policy.from_pretrained("owner/model.safetensors")
    with pytest.raises(ValueError, match="revision='v1' has no effect on the local folder"):
        PI05Policy.from_pretrained(tmp_path, revision="v1")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        PI05Policy.from_pretrained(tmp_path)

    def refuse(*args, **kwargs):
        raise OSError("403 Client Error: gated repo\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(OSError, match=r"'lerobot/pi05_base' \(revision abc\).*403.*licence.*HF_TOKEN.*without network"):
        PI05Policy.from_pretrained("lerobot/pi05_base", revision="abc")


def test_a_hub_repository_is_loaded_from_its_snapshot(make_policy, make_batch, tmp_path, monkeypatch):
    policy = make_policy()
    policy.save_pretrained(tmp_path / "snapshot")
    asked = {}

    def download(name, revision, allow_patterns):
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    loaded = PI05Policy.from_pretrained("someone/pi05", revision="abc")
    assert (asked["name"], asked["revision"]) == ("someone/pi05", "abc")
    noise, _ = draws(3)
    assert torch.equal(loaded.sample_actions(make_batch(), noise), policy.sample_actions(make_batch(), noise))
