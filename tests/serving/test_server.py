"""openpi's client against a server of ours: right actions, shared batches, and errors that stay with their cause."""

from __future__ import annotations

import contextlib
import logging
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openpi_client import msgpack_numpy
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from soma_lightning.models import PI05Policy
from soma_lightning.serving import PolicyServer, PolicySettings, ServedPolicy, ServerSettings
from soma_lightning.serving.policy import draw_noise
from tests.serving.fakes import StatePolicy, acted, ask, observation, until


@contextlib.contextmanager
def served(policy: Any, settings: PolicySettings | None = None, **changes: Any) -> Iterator[PolicyServer]:
    """A server in this process."""
    offered = ServedPolicy(policy, "state", settings or PolicySettings())
    if isinstance(policy, StatePolicy):
        policy.batches.clear()  # the first look of ServedPolicy itself
    server = PolicyServer(ServerSettings(port=0, **changes))
    with server.in_background(offered):
        yield server


@pytest.fixture(scope="module")
def tiny(policy_folder: Path) -> PI05Policy:
    return PI05Policy.from_pretrained(policy_folder).eval()


def directly(policy: PI05Policy, seen: dict[str, Any], noise: torch.Tensor, steps: int) -> np.ndarray:
    """`sample_actions` on a batch that is put together here: [H, A]."""
    batch = {
        "observation.images.image": torch.tensor(seen["observation/image"]).permute(2, 0, 1)[None],
        "observation.images.image2": torch.tensor(seen["observation/wrist_image"]).permute(2, 0, 1)[None],
        "observation.state": torch.tensor(seen["observation/state"], dtype=torch.float32)[None],
        "task": [seen["prompt"]],
    }
    return policy.sample_actions(batch, noise[None], steps)[0].numpy()


def test_actions_are_those_of_the_policy_itself(tiny: PI05Policy) -> None:
    settings = PolicySettings(executed_steps=6, denoising_steps=3, seed=11)
    with served(tiny, settings) as server:
        client = WebsocketClientPolicy(server.address)
        assert client.get_server_metadata() | {"server": ""} == {
            "server": "",
            "model_type": "state",
            "action_dim": 7,
            "action_horizon": 6,
            "chunk_size": 8,
            "cameras": ["observation.images.image", "observation.images.image2"],
            "state_dim": 8,
            "denoising_steps": 3,
            "seed": 11,
        }
        for number in range(3):
            seen = observation(number)
            answer = client.infer(seen)
            wanted = directly(tiny, seen, draw_noise(11, number, tiny.noise_shape), 3)[:6]
            np.testing.assert_array_equal(answer["actions"], wanted)
            assert (answer["actions"].dtype, answer["server_timing"]["batch_size"]) == (np.float32, 1)
        again = WebsocketClientPolicy(server.address).infer(observation(0))[
            "actions"
        ]  # a connection counts its own answers
        np.testing.assert_array_equal(again, directly(tiny, observation(0), draw_noise(11, 0, (8, 7)), 3)[:6])


def test_clients_share_a_batch_and_each_gets_its_own_answer(tiny: PI05Policy) -> None:
    with served(tiny, max_wait_ms=5000.0) as server:
        clients = [WebsocketClientPolicy(server.address) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda pair: pair[1].infer(observation(pair[0])), enumerate(clients)))
    assert [answer["server_timing"]["batch_size"] for answer in answers] == [8] * 8
    noise = draw_noise(0, 0, tiny.noise_shape)
    wanted = np.stack([directly(tiny, observation(n), noise, 5)[:4] for n in range(8)])
    apart = np.abs(wanted[:, None] - wanted).max(axis=(2, 3))[~np.eye(8, dtype=bool)].min()
    assert apart > 1e-3, "observations that hardly matter would not show a mistake"
    np.testing.assert_allclose(np.stack([answer["actions"] for answer in answers]), wanted, atol=1e-2 * apart)


def test_a_bad_request_is_one_error_and_neither_the_connection_nor_other_clients_end() -> None:
    with served(StatePolicy()) as server:
        client, other = WebsocketClientPolicy(server.address), WebsocketClientPolicy(server.address)
        other.infer(ask(0.5))
        for bad, told in (
            ({}, "error: the observation has no"),
            (ask(1) | {"state": 1}, "error: the observation has 'state', which the policy does not read"),
            (
                ask(1) | {"observation.state": np.zeros(3)},
                r"error: 'observation.state' must be one state, \[2\], got \[3\]",
            ),
            (
                {"observation/image": np.zeros((4, 4, 3), np.uint8)},
                "'observation/image', which the policy does not read",
            ),
            (ask(1, "refuse"), "error: this instruction is refused"),
            (ask(float("nan")), "error: 'observation.state' holds NaN"),
        ):
            with pytest.raises(RuntimeError, match=told):
                client.infer(bad)
        np.testing.assert_array_equal(client.infer(ask(1))["actions"], acted(1))  # errors do not count
        np.testing.assert_array_equal(other.infer(ask(0.5))["actions"], acted(0.5, 1))


def test_what_is_no_message_is_an_error_and_too_large_a_one_ends_its_connection() -> None:
    with served(StatePolicy(), max_message_mb=0.01) as server, connect(server.address) as raw:
        raw.recv()
        for junk, told in (
            ("text", "binary message"),
            (b"\xc1", "cannot be read"),
            (msgpack_numpy.packb([1]), "must be a map"),
            (msgpack_numpy.packb({"task": msgpack_numpy.msgpack.ExtType(3, b"")}), "extension type 3 is refused"),
        ):
            raw.send(junk)
            answer = raw.recv(timeout=10)
            assert isinstance(answer, str)
            assert told in answer
        raw.send(msgpack_numpy.packb(ask(2)))
        np.testing.assert_array_equal(msgpack_numpy.unpackb(raw.recv(timeout=10))["actions"], acted(2))
        with contextlib.suppress(ConnectionClosed):
            raw.send(msgpack_numpy.packb({"task": "x" * 20_000}))
        with pytest.raises(ConnectionClosed) as closed:
            raw.recv(timeout=10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        np.testing.assert_array_equal(WebsocketClientPolicy(server.address).infer(ask(3))["actions"], acted(3))


def test_an_error_of_the_policy_reaches_its_cause_alone_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    policy = StatePolicy()
    with served(policy, max_wait_ms=5000.0) as server, caplog.at_level(logging.ERROR):
        clients = [WebsocketClientPolicy(server.address) for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            answers = [
                pool.submit(client.infer, ask(n, word))
                for n, (client, word) in enumerate(zip(clients, ("go", "break", "go"), strict=True))
            ]
        np.testing.assert_array_equal(answers[0].result()["actions"], acted(0))
        np.testing.assert_array_equal(answers[2].result()["actions"], acted(2))
        with pytest.raises(RuntimeError, match="error: the policy failed .KeyError: 'broken'.; the server's log"):
            answers[1].result()
        assert len(policy.batches[0]) == 3
        assert "predict_action_batch" in caplog.text


def test_a_request_that_waits_too_long_gets_an_error_and_the_next_one_an_answer() -> None:
    policy = StatePolicy()
    with served(policy, timeout_s=0.3, max_wait_ms=0.0) as server, ThreadPoolExecutor(1) as pool:
        slow, late = WebsocketClientPolicy(server.address), WebsocketClientPolicy(server.address)
        working = pool.submit(slow.infer, ask(1, "wait"))
        until(lambda: len(policy.batches) == 1)
        with pytest.raises(RuntimeError, match=r"error: no answer within timeout_s=0.3"):
            late.infer(ask(2, "too late"))
        with pytest.raises(RuntimeError, match=r"error: no answer within timeout_s=0.3"):
            working.result()
        policy.may_go_on.set()
        np.testing.assert_array_equal(late.infer(ask(2))["actions"], acted(2))
        assert policy.batches == [["wait"], ["go"]]


def test_a_full_queue_answers_at_once() -> None:
    policy = StatePolicy()
    with served(policy, max_waiting=1, max_wait_ms=0.0) as server, ThreadPoolExecutor(2) as pool:
        working, queued, refused = (WebsocketClientPolicy(server.address) for _ in range(3))
        first = pool.submit(working.infer, ask(0, "wait"))
        until(lambda: len(policy.batches) == 1)
        second = pool.submit(queued.infer, ask(1))
        until(lambda: len(server._answering) == 2)
        with pytest.raises(RuntimeError, match="error: 1 requests wait already, as many as max_waiting allows"):
            refused.infer(ask(2))
        policy.may_go_on.set()
        np.testing.assert_array_equal(first.result()["actions"], acted(0))
        np.testing.assert_array_equal(second.result()["actions"], acted(1))
        np.testing.assert_array_equal(refused.infer(ask(2))["actions"], acted(2))


def test_a_client_that_dies_stops_nothing() -> None:
    policy = StatePolicy()
    with served(policy, max_wait_ms=0.0) as server, contextlib.ExitStack() as stack:
        dying, queued, other = (stack.enter_context(connect(server.address)) for _ in range(3))
        for raw in (dying, queued, other):
            raw.recv()
        dying.send(msgpack_numpy.packb(ask(0, "wait")))
        until(lambda: len(policy.batches) == 1)
        queued.send(msgpack_numpy.packb(ask(1, "of a client that goes")))
        until(lambda: len(server._answering) == 2)
        for raw in (dying, queued):  # as the system does when a process is killed
            raw.socket.shutdown(socket.SHUT_RDWR)
        until(lambda: not server._answering)
        other.send(msgpack_numpy.packb(ask(2)))
        with pytest.raises(TimeoutError):
            other.recv(timeout=0.2)
        policy.may_go_on.set()
        np.testing.assert_array_equal(msgpack_numpy.unpackb(other.recv(timeout=10))["actions"], acted(2))
        assert policy.batches == [["wait"], ["go"]]


def test_health_is_told_and_browsers_are_refused() -> None:
    with served(StatePolicy()) as server:
        with urllib.request.urlopen(server.address.replace("ws:", "http:") + "/healthz", timeout=10) as answer:
            assert (answer.status, answer.read()) == (200, b"OK\n")
        with pytest.raises(InvalidStatus, match="403"):
            connect(server.address, origin="https://a-web-page.example")


def test_the_end_closes_connections_and_gives_the_port_back() -> None:
    with served(StatePolicy()) as server:
        client = WebsocketClientPolicy(server.address)
        client.infer(ask(1))
        port = server.port
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port} .*choose another --host or --port"):
            PolicyServer(ServerSettings(port=port))
    with pytest.raises(ConnectionClosed) as closed:
        client.infer(ask(1))
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001
    PolicyServer(ServerSettings(port=port)).close()


def test_what_stops_a_server_in_a_thread_is_raised_here() -> None:
    offered = ServedPolicy(StatePolicy(), "state", PolicySettings())
    first = PolicyServer(ServerSettings(port=0))
    second = PolicyServer(ServerSettings(port=first.port))  # bound before the first one listens
    with first.in_background(offered), pytest.raises(OSError, match="in use"), second.in_background(offered):
        pytest.fail("two servers listen on one port")
    second.close()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"port": 70000}, "port=70000 must lie in 0..65535"),
        ({"max_batch_size": 0}, "max_batch_size=0 must be at least 1"),
        ({"max_waiting": 0}, "max_waiting=0 must be at least 1"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 must be positive"),
        ({"max_message_mb": float("nan")}, "max_message_mb=nan must be positive"),
        ({"max_message_mb": float("inf")}, "max_message_mb=inf must be finite"),
        ({"max_message_mb": 1e-9}, "max_message_mb=1e-09 must be finite, and at least one byte"),
        ({"max_wait_ms": -1.0}, "max_wait_ms=-1.0 must not be negative"),
    ],
)
def test_impossible_settings_of_a_server(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ServerSettings(**changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"executed_steps": 0}, "executed_steps=0 must be at least 1"),
        ({"executed_steps": 9}, "executed_steps=9 is more than the 4 actions that the policy predicts"),
        ({"denoising_steps": 0}, "denoising_steps=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_impossible_settings_of_a_policy(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ServedPolicy(StatePolicy(), "state", PolicySettings(**changes))


def test_a_policy_that_cannot_act_is_told_before_a_client_comes(tiny: PI05Policy) -> None:
    with pytest.raises(
        ValueError, match="Linear cannot be served: it has no predict_action_batch, noise_shape, config"
    ):
        ServedPolicy(torch.nn.Linear(1, 1), "linear", PolicySettings())
    policy = StatePolicy()
    policy.noise_shape = (3, 2)
    policy.predict_action_batch = lambda *args, **kwargs: (torch.zeros(1, 4, 2), {})
    with pytest.raises(ValueError, match=r"predicts actions of shape \[1, 4, 2\], not \[1, 3, action dimensions\]"):
        ServedPolicy(policy, "state", PolicySettings())
    policy.predict_action_batch = lambda *args, **kwargs: (torch.full((1, 3, 2), torch.nan), {})
    with pytest.raises(ValueError, match="actions that are not finite"):
        ServedPolicy(policy, "state", PolicySettings())
