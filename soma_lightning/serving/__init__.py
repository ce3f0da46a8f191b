"""A policy for other processes: the openpi websocket protocol, requests of all clients in one batch."""

from soma_lightning.serving.policy import PolicySettings as PolicySettings
from soma_lightning.serving.policy import ServedPolicy as ServedPolicy
from soma_lightning.serving.server import PolicyServer as PolicyServer
from soma_lightning.serving.server import ServerSettings as ServerSettings
