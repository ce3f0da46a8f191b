"""Data sets, statistics and data modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soma_lightning.imports import lazy_names

if TYPE_CHECKING:
    from soma_lightning.data.augmentation import ImageAugmentation as ImageAugmentation
    from soma_lightning.data.datamodule import LeRobotDataModule as LeRobotDataModule
    from soma_lightning.data.feature_cache import FeatureCache as FeatureCache
    from soma_lightning.data.inspection import inspect_dataset as inspect_dataset
    from soma_lightning.data.lerobot import LeRobotDataset as LeRobotDataset
    from soma_lightning.data.lerobot_writer import LeRobotWriter as LeRobotWriter
    from soma_lightning.data.sources import DataSource as DataSource
    from soma_lightning.data.statistics import compute_statistics as compute_statistics
    from soma_lightning.models.normalization import load_statistics as load_statistics
    from soma_lightning.models.normalization import save_statistics as save_statistics

_HOME_OF_NAME = {
    "DataSource": "soma_lightning.data.sources",
    "FeatureCache": "soma_lightning.data.feature_cache",
    "ImageAugmentation": "soma_lightning.data.augmentation",
    "LeRobotDataModule": "soma_lightning.data.datamodule",
    "LeRobotDataset": "soma_lightning.data.lerobot",
    "LeRobotWriter": "soma_lightning.data.lerobot_writer",
    "compute_statistics": "soma_lightning.data.statistics",
    "inspect_dataset": "soma_lightning.data.inspection",
    "load_statistics": "soma_lightning.models.normalization",
    "save_statistics": "soma_lightning.models.normalization",
}

__all__ = list(_HOME_OF_NAME)

__getattr__, __dir__ = lazy_names(__name__, _HOME_OF_NAME)
