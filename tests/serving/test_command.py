"""`soma serve` as a process of its own: the first line, loopback, signals, and errors before a policy is loaded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from websockets.exceptions import ConnectionClosed

from soma_lightning.cli.main import main
from soma_lightning.cli.serve import is_loopback
from soma_lightning.contract import batch_from_observation
from soma_lightning.models import PI05Policy
from soma_lightning.serving import PolicyServer, ServerSettings
from soma_lightning.serving.policy import draw_noise
from tests.serving.fakes import acted, ask, observation

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def soma_serve(*options: str, extension: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", "soma_lightning.cli.main", "serve", "--port", "0", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SOMA_EXT_MODULE": extension},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # ends with the process, too
        found = re.fullmatch(r"serving (.+) on (ws://127\.0\.0\.1:\d+)\n", line)
        assert found is not None, (line, process.communicate(timeout=10))
        yield process, found[2]
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and what it said last."""
    _, error = process.communicate(timeout=60)
    return process.returncode, error


def test_a_checkpoint_acts_as_it_does_here_until_ctrl_c(policy_folder: Path) -> None:
    with soma_serve("--policy", str(policy_folder), "--seed", "3", "--executed_steps", "5") as (process, address):
        client = WebsocketClientPolicy(address)
        assert client.get_server_metadata()["model_type"] == "pi05"
        seen = observation(1)
        actions = client.infer(seen)["actions"]
        process.send_signal(signal.SIGINT)
        assert ended(process) == (0, "soma serve: ended\n")
        with pytest.raises(ConnectionClosed):
            client.infer(seen)
    batch = batch_from_observation(
        {
            "main_images": seen["observation/image"][None],
            "wrist_images": seen["observation/wrist_image"][None],
            "states": seen["observation/state"][None],
            "task_descriptions": [seen["prompt"]],
        }
    )
    policy = PI05Policy.from_pretrained(policy_folder).eval()
    wanted = policy.sample_actions(batch, draw_noise(3, 0, policy.noise_shape)[None])[0, :5]
    torch.testing.assert_close(torch.tensor(actions), wanted, rtol=1e-5, atol=1e-5)


def test_a_registered_policy_gives_its_last_answer_after_sigterm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"type": "state"}))
    with (
        soma_serve("--policy", str(tmp_path), extension="tests.serving.fakes") as (process, address),
        ThreadPoolExecutor(1) as pool,
    ):
        client = WebsocketClientPolicy(address)
        np.testing.assert_array_equal(client.infer(ask(1))["actions"], acted(1))
        last = pool.submit(client.infer, ask(2, "sleep"))
        assert process.stdout is not None
        assert process.stdout.readline() == "asleep\n"
        process.send_signal(signal.SIGTERM)
        np.testing.assert_array_equal(last.result(timeout=60)["actions"], acted(2, 1))
        assert ended(process) == (0, "soma serve: ended\n")


def test_what_is_wrong_is_one_line_before_a_policy_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = PolicyServer(ServerSettings(port=0))
    server._socket.listen()  # as it does when it runs
    for options, told in (
        (["--port", str(server.port)], f"cannot listen on 127.0.0.1:{server.port}"),
        (["--port", "0"], "holds no config.json"),
        (["--policy_options", '{"device": "cpu"}'], "must not name the device: that is --device"),
        (["--max_batch_size", "0"], "max_batch_size=0 must be at least 1"),
        (["--device", "abacus", "--port", "0"], "device='abacus' is unknown"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
    ):
        assert main(["serve", "--policy", str(tmp_path), *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert told in error
        assert error.count("\n") == 1
    server.close()


def test_only_this_machine_reaches_the_default_host() -> None:
    assert is_loopback(ServerSettings().host)
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "robot", "10.0.0.5")] == [
        True,
        True,
        True,
        *[False] * 4,
    ]
