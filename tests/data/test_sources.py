"""Mixtures of data sets: shares, filters, maps, and settings that cannot be meant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.data import _update_dataloader

from soma_lightning.data import DataSource, LeRobotDataModule
from soma_lightning.data.sampling import EpochSampler, MixtureSampler
from soma_lightning.data.sources import choose_episodes, parse_ranges

Record = Callable[..., Path]
CAMERA = "observation.images.image"


def numbers_of(loader: Any, key: str = "index") -> list[int]:
    return [int(i) for batch in loader for i in batch[key]]


class TestShares:
    @pytest.mark.parametrize(("sizes", "weights"), [([7, 3, 20], [1, 1, 1]), ([5, 5], [9, 1]), ([2, 50], [0.3, 0.7])])
    def test_over_epochs_every_frame_of_a_source_is_drawn_equally_often(self, sizes: list[int], weights: list[float]):
        sampler = MixtureSampler(sizes, weights, seed=3)
        starts = np.cumsum([0, *sizes])
        drawn: Counter[int] = Counter()
        for epoch in range(11):
            sampler.set_epoch(epoch)
            order = list(sampler)
            assert len(order) == len(sampler) == sum(sizes)
            drawn.update(order)
            for source, weight in enumerate(weights):
                got = sum(starts[source] <= i < starts[source + 1] for i in order)
                assert abs(got - sum(sizes) * weight / sum(weights)) < 1
            for source in range(len(sizes)):
                counts = [drawn[i] for i in range(starts[source], starts[source + 1])]
                assert max(counts) - min(counts) <= 1, "a pass was cut or repeated between epochs"

    def test_an_order_depends_on_seed_and_epoch_alone(self):
        def order(seed: int, epoch: int) -> tuple[int, ...]:
            sampler = MixtureSampler([9, 14], [1, 3], seed)
            sampler.set_epoch(epoch)
            return tuple(sampler)

        assert order(1, 4) == order(1, 4)
        assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
        first = order(0, 0)
        assert any(first[i] < 9 for i in range(8)), "sources are not mixed"
        assert any(first[i] >= 9 for i in range(8)), "sources are not mixed"

    def test_a_source_without_a_sample_is_refused(self):
        with pytest.raises(
            ValueError, match=r"weights \[1, 1000\] leave source 0 without a single one of the 20 samples"
        ):
            MixtureSampler([10, 10], [1, 1000])

    def test_batches_follow_the_weights(self, record: Record):
        small, large = record((6, 6), name="small"), record((30, 30), name="large", offset=1000.0)
        data = LeRobotDataModule(
            [DataSource(str(small), weight=3), {"root": str(large), "weight": 1}],
            batch_size=8,
            chunk_size=2,
            val_fraction=0,
        )
        loader = data.train_dataloader()
        for _ in range(2):
            seen = numbers_of(loader)
            assert len(seen) == 72
            assert sum(i < 12 for i in seen) == 54
        facts = data.report_facts()["sources"]
        assert [(f["share"], f["passes_per_epoch"]) for f in facts] == [(0.75, 4.5), (0.25, 0.3)]

    def test_without_weights_every_frame_once(self, record: Record):
        roots = [record((6, 6), name="small"), record((30, 30), name="large")]
        data = LeRobotDataModule([str(root) for root in roots], batch_size=8, chunk_size=2, val_fraction=0)
        assert type(data.train_dataloader().sampler) is EpochSampler
        assert sorted(numbers_of(data.train_dataloader())) == list(range(72))
        assert [f["passes_per_epoch"] for f in data.report_facts()["sources"]] == [1.0, 1.0]

    def test_ranks_share_an_epoch_and_resume_inside_it(self, record: Record):
        roots = [record((9, 9), name="a"), record((20, 20), name="b")]

        def loader(rank: int | None) -> Any:
            sources = [DataSource(str(root), weight=1) for root in roots]
            made = LeRobotDataModule(sources, batch_size=4, chunk_size=2, val_fraction=0, seed=5).train_dataloader()
            if rank is None:
                return made
            return _update_dataloader(
                made, DistributedSamplerWrapper(made.sampler, num_replicas=2, rank=rank, shuffle=True)
            )

        def batches(rank: int | None, state: dict[str, int]) -> list[list[int]]:
            made = loader(rank)
            made.load_state_dict(state)
            return [batch["index"].tolist() for batch in made]

        whole = Counter(sum(batches(None, {"epoch": 2, "batches": 0}), []))
        shares = [batches(rank, {"epoch": 2, "batches": 0}) for rank in (0, 1)]
        together = Counter(sum(shares[0] + shares[1], []))
        assert sum((together - whole).values()) <= 2  # the wrapper draws a last, full batch
        assert sum((whole - together).values()) <= 2
        for rank in (0, 1):
            assert batches(rank, {"epoch": 2, "batches": 3}) == shares[rank][3:]

    @pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
    def test_weights_that_are_no_share(self, weight: float):
        with pytest.raises(ValueError, match=f"weight={weight} of 'a' must be a positive number"):
            LeRobotDataModule([{"root": "a", "weight": weight}, {"root": "b", "weight": 1.0}])

    def test_a_weight_of_some_sources_only(self):
        with pytest.raises(ValueError, match=r"\['b'\] have no weight, but other sources have"):
            LeRobotDataModule([DataSource("a", weight=1.0), "b"])


class TestFilters:
    @pytest.mark.parametrize(
        ("filters", "expected"),
        [
            ({"episodes": [3, 1]}, [1, 3]),
            ({"episodes": "0:2,4"}, [0, 1, 4]),
            ({"episodes": "3:"}, [3, 4]),
            ({"min_length": 6}, [1, 3]),
            ({"min_length": 5, "max_length": 6}, [0, 3]),
            ({"max_episodes": 2}, [0, 1]),
            ({"max_episodes": 1, "min_length": 6}, [1]),
            ({"tasks": ["reach the green disc"]}, [1, 3]),
            ({"tasks": ["pick*"]}, [0, 2, 4]),
            ({"tasks": ["pick*", "reach*"], "episodes": "1:4", "max_length": 6}, [2, 3]),
        ],
    )
    def test_choose_episodes(self, record: Record, filters: dict[str, Any], expected: list[int]):
        root = record((5, 7, 4, 6, 3))
        assert choose_episodes(DataSource(str(root), **filters)) == expected
        data = LeRobotDataModule(DataSource(str(root), **filters), batch_size=1, chunk_size=2, val_fraction=0)
        assert sorted(set(numbers_of(data.train_dataloader(), "episode_index"))) == expected
        assert filters.items() <= data.report_facts()["sources"][0].items()

    def test_both_splits_are_of_the_chosen_episodes(self, record: Record):
        source = DataSource(str(record((4,) * 10)), episodes="2:8")
        data = LeRobotDataModule(source, batch_size=1, chunk_size=1, val_fraction=0.5)
        train, val = (
            set(numbers_of(made, "episode_index")) for made in (data.train_dataloader(), data.val_dataloader())
        )
        assert len(train) == len(val) == 3
        assert train | val == set(range(2, 8))

    def test_nothing_left_says_what_there_is(self, record: Record):
        root = str(record((5, 7)))
        message = (
            r"no episode of '.*' passes {'min_length': 8}: it has 2 episodes of 5 to 7 frames with the tasks \['pick"
        )
        with pytest.raises(ValueError, match=message):
            LeRobotDataModule(DataSource(root, min_length=8), batch_size=1, chunk_size=1).setup()
        with pytest.raises(
            ValueError, match=r"matches \['push\*'\]; the chosen episodes have \['pick up the cube', 'reach"
        ):
            choose_episodes(DataSource(root, tasks=["pick*", "push*"]))
        with pytest.raises(ValueError, match=r"episodes \[2, 3\] are not in '.*', which has the episodes 0 to 1"):
            choose_episodes(DataSource(root, episodes="0:4"))

    @pytest.mark.parametrize("text", ["", "a", "3:1", "2:2", "-1", "1,,2", "1:2:3"])
    def test_no_ranges(self, text: str):
        with pytest.raises(ValueError, match=r"is no number or range; write e\.g\. \"0:50,60\""):
            parse_ranges(text, 9)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"min_length": 0}, "min_length=0 of 'a' must be at least 1"),
            ({"tasks": []}, r"tasks=\[\] of 'a' must be a list of at least one instruction"),
            ({"tasks": "pick*"}, r"tasks='pick\*' of 'a' must be a list"),
            ({"episodes": 110}, r'episodes=110 of \'a\' is a number; write a list .*in quotes \("1:50"\)'),
            ({"wieght": 1.0}, r"a source has no \['wieght'\]; it has \['root', 'weight'"),
        ],
    )
    def test_fields_out_of_range(self, fields: dict[str, Any], message: str):
        with pytest.raises(ValueError, match=message):
            LeRobotDataModule({"root": "a", **fields})

    def test_one_data_set_may_stand_twice_with_other_episodes(self, record: Record):
        root = str(record((5, 5, 5, 5)))
        parts = [DataSource(root, weight=3, tasks=["pick*"]), DataSource(root, weight=1, tasks=["reach*"])]
        data = LeRobotDataModule(parts, batch_size=1, chunk_size=1, val_fraction=0)
        tasks = Counter(task for batch in data.train_dataloader() for task in batch["task"])
        assert tasks == {"pick up the cube": 15, "reach the green disc": 5}
        with pytest.raises(ValueError, match=r"twice with the same episodes \[1\] \(1 in all\)"):
            LeRobotDataModule([DataSource(root, episodes="0:2"), DataSource(root, episodes="1:4")]).setup()


class TestMaps:
    def test_robots_with_other_names_and_orders_mix(self, record: Record):
        ours = record((5, 5), name="ours")
        theirs = record((5, 5), name="theirs", state_dim=5, action_dim=3, cameras=("observation.images.top",))
        other = DataSource(
            str(theirs),
            cameras={"observation.images.top": CAMERA},
            state_indices=[1, 0, 4],
            action_indices=[1, 0],
            action_scale=[-1.0, 2.0],
            action_offset=[0.5, 0.0],
        )
        data = LeRobotDataModule([str(ours), other], batch_size=1, chunk_size=1, val_fraction=0, drop_last=False)
        assert (data.state_dim, data.action_dim, data.cameras) == (3, 2, [CAMERA])
        batch = next(b for b in data.train_dataloader() if int(b["index"]) == 18)  # theirs: episode 1, frame 3
        assert batch["observation.state"].tolist() == [[3, 1, 0]]
        assert batch["action"].tolist() == [[[3.5, 206.0]]]
        assert data.statistics["action"]["max"].tolist() == [104.0, 208.0]

    def test_a_scale_is_in_the_statistics(self, record: Record):
        source = DataSource(str(record((5, 5))), action_scale=[-1.0, 1.0])
        data = LeRobotDataModule(source, batch_size=1, chunk_size=1)
        assert data.statistics_source.startswith("computed from 10 frames")
        assert data.statistics["action"]["min"].tolist() == [-104.0, -4.0]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"action_scale": [1.0]}, r"action_scale=\[1.0\] must hold 2 finite numbers"),
            ({"action_offset": [1.0, math.nan]}, r"action_offset=\[1.0, nan\] must hold 2 finite numbers"),
            ({"action_scale": [1.0, 0.0]}, r"action_scale=\[1.0, 0.0\] has a 0; leave that dimension out"),
        ],
    )
    def test_scales_that_do_not_fit(self, record: Record, fields: dict[str, Any], message: str):
        with pytest.raises(ValueError, match=message):
            LeRobotDataModule(DataSource(str(record()), **fields), batch_size=1, chunk_size=1).setup()

    def test_a_source_keeps_what_it_says_itself(self, record: Record):
        roots = [str(record(name="a")), str(record(name="b"))]
        data = LeRobotDataModule(
            [roots[0], DataSource(roots[1], max_episodes=3, action_indices=[0, 1])],
            batch_size=1,
            chunk_size=1,
            max_episodes=2,
            action_indices=[1, 0],
        )
        assert data.num_episodes == 5
        assert [part.actions[-1].tolist() for part in data.train_data.parts] != [[0, 0], [0, 0]]
        assert [source.action_indices for source in data.sources] == [[1, 0], [0, 1]]


def test_a_configuration_file_can_say_all_of_it(tmp_path: Path):
    text = """
    class_path: soma_lightning.data.LeRobotDataModule
    init_args:
      root:
      - outputs/demos/pick
      - root: outputs/demos/reach
        episodes: "1:50,60"
        tasks: [reach*]
        cameras: {observation.images.top: observation.images.image}
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LeRobotDataModule, "data")
    config = parser.parse_object({"data": yaml.safe_load(text)})
    data = (
        parser.instantiate(config).data if hasattr(parser, "instantiate") else parser.instantiate_classes(config).data
    )
    assert [source.root for source in data.sources] == ["outputs/demos/pick", "outputs/demos/reach"]
    assert data.sources[1].filters == {"episodes": "1:50,60", "tasks": ["reach*"]}
    assert data.sources[1].cameras == {"observation.images.top": CAMERA}
