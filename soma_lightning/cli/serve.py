"""`soma serve`: offers a checkpoint to other processes over the openpi websocket protocol."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import Any

from soma_lightning.cli.checkpoint import check_policy_options, load_policy, stored_type
from soma_lightning.cli.parser import CommandParser
from soma_lightning.imports import require_package
from soma_lightning.models.registry import load_extensions, pick_device


def serve_policy(
    policy: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    executed_steps: int | None = None,
    denoising_steps: int | None = None,
    seed: int = 0,
    cameras: dict[str, str] | None = None,
    max_batch_size: int = 8,
    max_wait_ms: float = 10.0,
    max_waiting: int = 64,
    timeout_s: float = 30.0,
    max_message_mb: float = 16.0,
    model_type: str | None = None,
    policy_options: dict[str, Any] | None = None,
    device: str = "auto",
) -> None:
    """Answers observations of clients with action chunks until SIGINT (Ctrl-C) or SIGTERM.

    Args:
        policy: folder of the checkpoint (as `soma fit` or `save_pretrained` writes it).
        host: address to listen on; only this machine reaches the default.
        port: port to listen on; 0 takes a free one. The first line printed says which.
        executed_steps: actions of an answer; the checkpoint's own when left out.
        denoising_steps: Euler steps of the flow; the checkpoint's own when left out.
        seed: seed of the policy's noise.
        cameras: {name in a client's message: camera that the policy knows}, in addition to the documented names.
        max_batch_size: requests that are answered in one batch.
        max_wait_ms: how long the first request of a batch waits for those of other clients.
        max_waiting: requests that may wait for a batch; more are refused at once.
        timeout_s: seconds from a message to its answer; then the client gets an error.
        max_message_mb: size of a message in MiB; a larger one ends its connection.
        model_type: registered model type; read from the checkpoint's config.json when left out.
        policy_options: how the checkpoint is loaded, e.g. {"cuda_graphs": true} (the entries of `get_model`).
        device: "auto", "cpu" or "cuda".
    """
    for package in ("websockets", "msgpack"):
        require_package(package, purpose="serve a policy")
    from soma_lightning.serving import PolicyServer, PolicySettings, ServedPolicy, ServerSettings

    check_policy_options(policy_options)
    settings = PolicySettings(executed_steps, denoising_steps, seed, cameras or {})
    server = PolicyServer(
        ServerSettings(host, port, max_batch_size, max_wait_ms, max_waiting, timeout_s, max_message_mb)
    )
    try:
        target = pick_device(device)
        load_extensions()
        model_type = model_type or stored_type(Path(policy))
        model = load_policy(policy, model_type, target, policy_options)
        served = ServedPolicy(model, model_type, settings)
        if not is_loopback(host):
            print(f"warning: host={host} lets other machines in, and nobody is asked who he is", file=sys.stderr)
        server.run(served, ready=lambda: print(f"serving {policy} on {server.address}", flush=True))
    finally:
        server.close()
    print("soma serve: ended", file=sys.stderr)


def is_loopback(host: str) -> bool:
    """True when only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def build_parser() -> CommandParser:
    """The options of `soma serve`: the arguments of `serve_policy`."""
    parser = CommandParser("serve", __doc__)
    parser.add_function_arguments(serve_policy)
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 after a signal, 2 for a wrong command line or bad input."""
    options = build_parser().parse_args(argv).as_dict()
    try:
        serve_policy(**options)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
