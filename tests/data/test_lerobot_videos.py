"""Videos: lerobot's own, random access against decoding in order, memory of workers, every refusal."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from soma_lightning import imports
from soma_lightning.data import lerobot_video_writer, lerobot_videos
from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.data.lerobot_format import DatasetFormatError
from soma_lightning.data.lerobot_images import GIB
from soma_lightning.data.lerobot_videos import VideoFile, VideoImages
from soma_lightning.data.lerobot_writer import LeRobotWriter
from tests.data.videos import (
    CAMERA,
    EPISODES_FILE,
    FPS,
    HEIGHT,
    LENGTHS,
    VIDEO_FILE,
    WIDTH,
    WRIST,
    decode,
    encode,
    features,
    frames,
    moving_square,
    put_index_first,
    record_noise,
    steady,
)

GOLDEN = Path(__file__).parents[1] / "goldens/lerobot_videos"


Record = Callable[..., Path]


@pytest.fixture
def several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Video files hold at most 3 s, so that each episode of `LENGTHS` begins another, or shares it with the next."""
    monkeypatch.setattr(lerobot_video_writer, "MAX_DURATION_S", 3)


def truth(root: Path, camera: str = CAMERA) -> np.ndarray:
    """Every frame of the data set, uint8 [N, 3, h, w], by decoding each file in order."""
    episodes = pq.read_table(root / EPISODES_FILE).to_pylist()
    images = []
    for episode in episodes:
        path = root / f"videos/{camera}/chunk-000/file-{episode[f'videos/{camera}/file_index']:03d}.mp4"
        decoded = list(decode(path).values())
        first = round(episode[f"videos/{camera}/from_timestamp"] * FPS)
        images += decoded[first : first + episode["length"]]
    return np.stack(images)


def edit_episodes(root: Path, column: str, change: Callable[[list[Any]], list[Any]]) -> None:
    table = pq.read_table(root / EPISODES_FILE)
    values = pa.array(change(table[column].to_pylist()))
    pq.write_table(table.set_column(table.column_names.index(column), column, values), root / EPISODES_FILE)


@pytest.mark.parametrize("preload", [False, True])
@pytest.mark.parametrize("codec", ["av1", "h264"])
def test_reads_what_lerobot_reads_in_its_own_recording(codec: str, preload: bool) -> None:
    golden = np.load(GOLDEN / "frames.npz")
    data = LeRobotDataset(GOLDEN / codec, chunk_size=4, preload=preload)
    assert (len(data), data.num_episodes, data.fps) == (38, 3, 20)
    rows = golden["kept"].tolist()
    batch = data.batch(rows)
    assert batch["observation.state"][:, :2].tolist() == [[0, 0], [1, 0], [1, 16], [2, 8]]
    assert batch["action"][2].tolist() == [[116, -16]] * 4
    for camera in (CAMERA, WRIST):
        # Another FFmpeg may convert colours with another rounding; the one that made the file gives the same bits.
        assert np.abs(batch[camera].numpy().astype(int) - golden[f"{codec}/{camera}"]).max() <= 1
        second = LeRobotDataset(GOLDEN / codec, episodes=[1], preload=preload)
        assert torch.equal(second[16][camera], batch[camera][2])


@pytest.mark.usefixtures("several_files")
def test_random_access_finds_the_frames_that_decoding_in_order_finds(record_video: Record) -> None:
    root = record_video((12, 17, 9, 30, 8))
    data, expected = LeRobotDataset(root), truth(root)
    assert sorted(path.name for path in (root / VIDEO_FILE).parent.iterdir()) == [f"file-00{i}.mp4" for i in range(4)]
    order = np.random.default_rng(0).integers(0, len(data), 300).tolist()
    for start in range(0, 300, 10):
        rows = order[start : start + 10]
        np.testing.assert_array_equal(data.batch([*rows, rows[0]])[CAMERA], expected[[*rows, rows[0]]])
    np.testing.assert_array_equal(np.stack([data[i][CAMERA] for i in range(len(data))]), expected)
    np.testing.assert_array_equal(np.stack([data[i][CAMERA] for i in range(len(data) - 1, -1, -1)]), expected[::-1])
    preloaded = LeRobotDataset(root, preload=True)
    np.testing.assert_array_equal(preloaded.batch(order)[CAMERA], expected[order])
    some = LeRobotDataset(root, episodes=[1, 3])
    np.testing.assert_array_equal(some.batch([0, 16, 17, 46])[CAMERA], expected[[12, 28, 38, 67]])


@pytest.mark.parametrize("gop", ["2", "13", "250"])
def test_any_distance_of_keyframes_and_b_frames(tmp_path: Path, gop: str) -> None:
    images = moving_square(60, 3)
    path = tmp_path / "b.mp4"
    encode(path, images, steady(60, FPS), FPS, g=gop, bf="3", crf="10")
    expected = list(decode(path).values())
    file = VideoFile(path, FPS)
    for row in [*range(60), *np.random.default_rng(1).integers(0, 60, 100), 59, 59, 0, 58]:
        np.testing.assert_array_equal(file.frame_at(row / FPS, 1e-4).transpose(2, 0, 1), expected[row])
    file.close()


def test_no_more_is_decoded_than_needed(record_video: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    advance = VideoFile._advance
    monkeypatch.setattr(VideoFile, "_advance", lambda self: decoded.append(1) or advance(self))
    data = LeRobotDataset(record_video((60,)))
    decoded.clear()
    data.batch(list(range(60)))
    assert len(decoded) <= 61  # in order: each frame once
    decoded.clear()
    data.batch([40, 8, 51, 8, 22])
    assert len(decoded) <= 8  # at random: the frame and at most the keyframe before it; a repeated one is at hand


@pytest.mark.usefixtures("several_files")
def test_open_files_are_bounded(record_video: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_videos, "_OPEN_FILES", 3)
    root = record_video((25,) * 5)
    data, expected = LeRobotDataset(root), truth(root)
    opened = []
    start = VideoFile.__init__
    monkeypatch.setattr(VideoFile, "__init__", lambda self, path, fps: opened.append(path) or start(self, path, fps))
    rows = list(range(0, 125, 5))
    for _ in range(4):
        np.testing.assert_array_equal(data.batch(rows)[CAMERA], expected[rows])
        assert len(data._images[CAMERA]._open) == 3
    assert len(opened) == 5 + 3 * 2  # what is open is used first: 3 of the 5 files each time


class WithMemory(Dataset[Any]):
    """Reads batches of a data set; answers with the memory of the process that does so, in MiB."""

    def __init__(self, data: LeRobotDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, rows: list[int]) -> float:
        self.data.batch(rows)
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.usefixtures("several_files")
def test_a_worker_that_decodes_keeps_its_memory(record_video: Record) -> None:
    cameras = dict.fromkeys((CAMERA, WRIST, "observation.images.image3"), "video")
    root = record_video((28,) * 4, cameras, size=(64, 64))
    rows = np.random.default_rng(0).integers(0, 4 * 28, 300 * 8)
    loader = DataLoader(
        WithMemory(LeRobotDataset(root)),
        batch_size=8,
        sampler=rows.tolist(),
        num_workers=1,
        collate_fn=lambda batch: batch,
        multiprocessing_context="fork",
    )
    memory = np.array(list(loader))
    assert len(memory) == 300
    assert memory[-20:].max() - memory[80:100].max() < 6  # keeping every frame would be 55 MiB


def test_a_forked_copy_does_not_share_its_position_in_the_files(tmp_path: Path) -> None:
    root = tmp_path / "data"
    record_noise(root, episodes=3)  # far more than is read ahead, so that each process goes on reading the file
    data, expected = LeRobotDataset(root), truth(root)
    np.testing.assert_array_equal(data[7][CAMERA], expected[7])
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def read_all() -> None:
        queue.put(all(np.array_equal(data[i][CAMERA], expected[i]) for i in range(60)))

    child = context.Process(target=read_all)
    child.start()
    same = all(np.array_equal(data[i][CAMERA], expected[i]) for i in range(60))
    child.join(20)
    assert child.exitcode == 0
    assert queue.get()
    assert same


def test_a_pickled_copy_reads_the_same(record_video: Record) -> None:
    data = LeRobotDataset(record_video(cameras={CAMERA: "video", WRIST: "image"}))
    before = data.batch([3, 20])
    copy = pickle.loads(pickle.dumps(data))
    assert not copy._images[CAMERA]._open
    for camera in (CAMERA, WRIST):
        assert torch.equal(copy.batch([3, 20])[camera], before[camera])


@pytest.mark.parametrize("preload", [False, True])
def test_images_and_videos_in_one_data_set(record_video: Record, preload: bool) -> None:
    cameras = {CAMERA: "video", WRIST: "image"}
    root = record_video(cameras=cameras)
    data = LeRobotDataset(root, cameras={WRIST: "observation.images.hand", CAMERA: CAMERA}, preload=preload)
    batch = data.batch([12, 37])
    np.testing.assert_array_equal(batch[CAMERA], truth(root)[[12, 37]])
    recorded = [frames(episode, LENGTHS[episode], cameras)[WRIST] for episode in (1, 2)]
    np.testing.assert_array_equal(batch["observation.images.hand"][0], recorded[0][0].transpose(2, 0, 1))
    np.testing.assert_array_equal(batch["observation.images.hand"][1], recorded[1][8].transpose(2, 0, 1))
    only = LeRobotDataset(root, cameras={WRIST: WRIST}, preload=preload)
    assert list(only.cameras) == [WRIST]


def test_preload_names_the_size_before_it_decodes(record_video: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    root = record_video(cameras={CAMERA: "video", WRIST: "image"})
    monkeypatch.setattr(VideoImages, "decode_all", None)
    needed = 38 * 2 * 3 * HEIGHT * WIDTH / GIB
    with pytest.raises(ValueError, match=f"38 frames of 2 cameras into {needed:.2f} GiB, more than preload_limit_gib"):
        LeRobotDataset(root, preload=True, preload_limit_gib=needed / 2)


def test_pyav_is_asked_for_only_when_a_video_is(
    record_video: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = record_video(cameras={CAMERA: "video", WRIST: "image"})
    find = imports.find_spec
    monkeypatch.setattr(imports, "find_spec", lambda name: None if name == "av" else find(name))
    with pytest.raises(ImportError, match=r"av is needed to read the videos.*pip install 'soma-lightning\[data\]'"):
        LeRobotDataset(root)
    LeRobotDataset(root, cameras={WRIST: WRIST})
    with pytest.raises(ImportError, match=rf"record '{CAMERA}' as video .*pip install 'soma-lightning\[data\]'"):
        LeRobotWriter(tmp_path / "more", fps=FPS, features=features({CAMERA: "video"}))
    assert not [path.name for path in tmp_path.iterdir() if path.name != "data"]


# Refusals


def cut_end(root: Path) -> None:
    (root / VIDEO_FILE).write_bytes((root / VIDEO_FILE).read_bytes()[:-400])


def cut_frames(root: Path) -> None:
    put_index_first(root / VIDEO_FILE)
    content = (root / VIDEO_FILE).read_bytes()
    (root / VIDEO_FILE).write_bytes(content[: len(content) * 2 // 3])


def replace_video(count: int = 38, rate: int = FPS, size: tuple[int, int] = (HEIGHT, WIDTH)) -> Callable[[Path], None]:
    return lambda root: encode(root / VIDEO_FILE, moving_square(count, 0, *size), steady(count, rate), rate)


def start_late(root: Path) -> None:
    edit_episodes(root, f"videos/{CAMERA}/from_timestamp", lambda values: [*values[:2], 90.0])


def uneven(root: Path) -> None:
    times = steady(38, FPS)
    times[5] += Fraction(1, 50)
    encode(root / VIDEO_FILE, moving_square(38, 0), times, FPS)


def declare_depth(root: Path) -> None:
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][CAMERA]["info"]["is_depth_map"] = True
    (root / "meta/info.json").write_text(json.dumps(info))


def unknown_codec(root: Path) -> None:
    (root / VIDEO_FILE).write_bytes((root / VIDEO_FILE).read_bytes().replace(b"avc1", b"zzzz"))


WHERE = f"{VIDEO_FILE}: episode {{}}, camera '{CAMERA}', frame {{}}: "


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda root: (root / VIDEO_FILE).unlink(),
            f"{VIDEO_FILE} is missing; .* episode 0 of camera '{CAMERA}' is in",
        ),
        (cut_end, WHERE.format(0, 0) + "cannot be opened as a video: .*; copy or encode it anew"),
        (
            cut_frames,
            WHERE.format(2, 8) + "no frame was found, .*; the file ends there, with 38 frames: frames are missing",
        ),
        (replace_video(rate=20), WHERE.format(0, 0) + "the video runs at 20 frames per second .* declares fps=10"),
        (replace_video(size=(18, 24)), WHERE.format(0, 0) + "the video is 18x24, .* declares 16x24"),
        (
            replace_video(count=35),
            WHERE.format(2, 8) + r"the nearest frame is at 3.400000 s, the frame must be at 3.700000 s .*"
            "the file ends there, with 35 frames: frames are missing",
        ),
        (start_late, WHERE.format(2, 8) + "the nearest frame is at 3.7.*90.8.*or from_timestamp .* is wrong"),
        (unknown_codec, WHERE.format(0, 0) + "this PyAV has no decoder for the video; encode it anew"),
        (declare_depth, rf"\['{CAMERA}'\] of .* are depth maps, which no policy reads"),
        (lambda root: (root / VIDEO_FILE).write_text("no video"), "cannot be opened as a video"),
        (
            lambda root: edit_episodes(root, f"videos/{CAMERA}/from_timestamp", lambda v: [None, *v[1:]]),
            f"{EPISODES_FILE}: episode 0: videos/{CAMERA} has chunk 0, file 0 and from_timestamp None",
        ),
        (
            lambda root: edit_episodes(root, f"videos/{CAMERA}/from_timestamp", lambda v: [-1.0, *v[1:]]),
            f"episode 0: videos/{CAMERA}/from_timestamp is -1.0",
        ),
    ],
)
def test_refused_at_opening(record_video: Record, damage: Callable[[Path], None], message: str) -> None:
    root = record_video()
    damage(root)
    with pytest.raises(ValueError, match=message) as caught:
        LeRobotDataset(root)
    assert isinstance(caught.value, DatasetFormatError) or damage is declare_depth


def test_a_title_in_another_encoding_is_no_fault(record_video: Record) -> None:
    root = record_video()
    wanted = LeRobotDataset(root)[20][CAMERA]
    path = root / VIDEO_FILE
    path.write_bytes(path.read_bytes().replace(b"Lavf", b"\xe4vf!"))  # the name of the program that wrote it
    assert torch.equal(LeRobotDataset(root)[20][CAMERA], wanted)


def test_missing_video_columns(record_video: Record) -> None:
    root = record_video()
    table = pq.read_table(root / EPISODES_FILE)
    pq.write_table(table.drop_columns([f"videos/{CAMERA}/from_timestamp"]), root / EPISODES_FILE)
    with pytest.raises(DatasetFormatError, match=rf"lacks the columns \['videos/{CAMERA}/from_timestamp'\]"):
        LeRobotDataset(root)
    assert LeRobotDataset(root, cameras={})[0]["observation.state"].tolist() == [0, 0]


def test_a_frame_off_its_time_is_refused_when_it_is_read(record_video: Record) -> None:
    root = record_video()
    uneven(root)
    data = LeRobotDataset(root)
    message = (
        WHERE.format(0, 5)
        + r"the nearest frame is at 0.520000 s, the frame must be at 0.500000 s \(within 0.0001 s\); "
        "the frame rate is not constant .* encode the video at a constant rate of 10, or raise tolerance_s"
    )
    for _ in range(2):
        with pytest.raises(DatasetFormatError, match=message):
            data.batch([4, 5, 6])
        assert data[6][CAMERA].shape == (3, HEIGHT, WIDTH)  # an error spoils nothing for the others
    expected = list(decode(root / VIDEO_FILE).values())
    np.testing.assert_array_equal(LeRobotDataset(root, tolerance_s=0.03)[5][CAMERA], expected[5])


def test_the_nearest_of_two_frames_in_reach(tmp_path: Path) -> None:
    times = steady(10, FPS)
    times[4] = Fraction(47, 100)
    encode(tmp_path / "v.mp4", moving_square(10, 0), times, FPS)
    expected = list(decode(tmp_path / "v.mp4").values())
    file = VideoFile(tmp_path / "v.mp4", FPS)
    for time, frame in ((0.48, 4), (0.49, 5), (0.5, 5), (0.4, 4)):
        np.testing.assert_array_equal(file.frame_at(time, 0.08).transpose(2, 0, 1), expected[frame])
    file.close()
