"""Versions are published and followed: whole or not at all, whoever dies, whatever is damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowdiff.errors import ConfigError, LowDiffError, RunInUse, RunMismatch, StorageError
from lowdiff.persistence.versions.manifest import Manifest, manifest_name
from lowdiff.persistence.versions.subscriber import Subscriber, Version
from lowdiff.persistence.versions.target import FolderTarget, target_of
from lowdiff.persistence.versions.weights import Tensor
from lowdiff.persistence.versions.writer import VersionWriter
from tests.unit.persistence.s3_server import S3Server, running_server
from tests.unit.persistence.versions.made import Ending, published, same, weights_at

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as made:
        yield made


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, server: S3Server, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "a" / "target")
    return server.url(f"versions/{tmp_path.name}")


def newest(subscriber: Subscriber) -> Version:
    version = subscriber.newest()
    assert version is not None
    return version


@pytest.mark.cases(1)
def test_every_version_is_the_weights_of_its_step(place: str) -> None:
    follower, jumping = Subscriber(place), Subscriber(place)
    assert follower.newest() is None
    with VersionWriter(target_of(place), "run", anchor_every=4) as writer:
        for step in range(10):
            made = writer.publish(step, 2, weights_at(step))
            assert (made.base is None) == (step % 4 == 0)
            version = newest(follower)
            assert (version.step, version.incarnation) == (step, 2)
            assert same(version.tensors, weights_at(step))
            assert follower.newest() is None
            if step % 3 == 2:
                assert same(newest(jumping).tensors, weights_at(step))
    assert same(newest(Subscriber(place)).tensors, weights_at(9))


def test_a_lost_answer_of_a_store_is_no_other_publisher(server: S3Server, tmp_path: Path) -> None:
    place = server.url(f"lost/{tmp_path.name}")
    told: set[str] = set()

    def lost(method: str, name: str) -> bool:
        is_first = method == "PUT" and name not in told
        told.add(name)
        return is_first

    server.lost = lost
    try:
        with VersionWriter(target_of(place), "run") as writer:
            for step in range(3):
                writer.publish(step, 0, weights_at(step))
    finally:
        server.forget()
    assert same(newest(Subscriber(place)).tensors, weights_at(2))


def test_a_version_without_a_change_tells_its_step(tmp_path: Path) -> None:
    subscriber = Subscriber(tmp_path)
    with VersionWriter(FolderTarget(tmp_path), "run") as writer:
        writer.publish(1, 0, weights_at(1))
        newest(subscriber)
        made = writer.publish(2, 0, weights_at(1))
    assert made.parts == ()
    version = newest(subscriber)
    assert version.step == 2
    assert version.changed == frozenset()


def test_other_names_shapes_or_ties_make_an_anchor(tmp_path: Path) -> None:
    first = weights_at(1)
    renamed = {f"model.{name}": own for name, own in first.items()}
    reshaped = {**first, "embedding": Tensor("BF16", (8, 50), first["embedding"].bits)}
    with VersionWriter(FolderTarget(tmp_path), "run") as writer:
        for weights, aliases in (
            (first, {}),
            (renamed, {}),
            (reshaped, {}),
            (reshaped, {"head": "embedding"}),
        ):
            assert writer.publish(1, 0, weights, aliases).base is None
            version = newest(Subscriber(tmp_path))
            tied = {name: weights[own] for name, own in aliases.items()}
            assert same(version.tensors, {**weights, **tied})
        assert writer.publish(2, 0, weights_at(1) | reshaped, aliases).base is not None


def test_a_name_that_is_tied_to_nothing_is_refused(tmp_path: Path) -> None:
    with (
        VersionWriter(FolderTarget(tmp_path), "run") as writer,
        pytest.raises(ConfigError, match="head is tied to no tensor"),
    ):
        writer.publish(1, 0, weights_at(1), {"head": "tail"})


def test_old_anchors_go_with_what_follows_them(tmp_path: Path) -> None:
    published(tmp_path, range(13), anchor_every=3, keep_anchors=2)
    numbers = sorted(int(path.stem[1:]) for path in tmp_path.glob("v*.json"))
    assert numbers == [10, 11, 12, 13]
    assert {path.name[1:11] for path in tmp_path.glob("v*")} == {f"{n:010d}" for n in numbers}
    assert same(newest(Subscriber(tmp_path)).tensors, weights_at(12))


def test_withdrawn_versions_are_taken_by_nobody(tmp_path: Path) -> None:
    holding, late = Subscriber(tmp_path), Subscriber(tmp_path)
    with VersionWriter(FolderTarget(tmp_path), "run") as writer:
        for step in range(8):
            writer.publish(step, 0, weights_at(step))
        assert newest(holding).step == 7
    with VersionWriter(FolderTarget(tmp_path), "run") as writer:
        assert writer.withdraw(lambda made: made.incarnation == 0 and made.step > 5) == 2
        assert writer.withdraw(lambda made: made.incarnation == 0 and made.step > 5) == 0
        found = writer.newest()
        assert found is not None
        assert found.step == 5
        assert newest(late).step == 5
        assert holding.newest() is None
        made = writer.publish(6, 1, weights_at(6, seed=1))
        assert (made.version, made.base) == (9, None)
    for subscriber in (holding, late):
        version = newest(subscriber)
        assert (version.step, version.number) == (6, 9)
        assert same(version.tensors, weights_at(6, seed=1))


def test_a_publisher_that_goes_on_after_it_withdrew_begins_with_an_anchor(tmp_path: Path) -> None:
    with VersionWriter(FolderTarget(tmp_path), "run") as writer:
        for step in range(4):
            writer.publish(step, 0, weights_at(step))
        writer.withdraw(lambda made: made.step > 2)
        assert writer.publish(3, 1, weights_at(3)).base is None


def test_a_target_that_somebody_empties_goes_on_with_an_anchor(tmp_path: Path) -> None:
    target = tmp_path / "target"
    holding = Subscriber(target)
    with VersionWriter(FolderTarget(target), "run") as writer:
        for step in range(3):
            writer.publish(step, 0, weights_at(step))
        assert newest(holding).step == 2
        shutil.rmtree(target)
        made = writer.publish(3, 0, weights_at(3))
        assert (made.version, made.base) == (4, None)
        writer.publish(4, 0, weights_at(4))
    for subscriber in (holding, Subscriber(target)):
        assert same(newest(subscriber).tensors, weights_at(4))
    with pytest.raises(RunMismatch):
        VersionWriter(FolderTarget(target), "other")


@pytest.mark.parametrize("until", [2, 6])
@pytest.mark.parametrize("run", ["run", "other"])
def test_a_target_that_is_made_anew_is_followed_from_its_anchor(
    tmp_path: Path, run: str, until: int
) -> None:
    target = tmp_path / "target"
    published(target, range(4))
    holding = Subscriber(target)
    model = {name: own.to_torch().clone() for name, own in weights_at(0).items()}
    newest(holding).apply(model)
    shutil.rmtree(target)
    assert holding.newest() is None
    # Other weights under the same numbers; `constant` changes in no step.
    with VersionWriter(FolderTarget(target), run) as writer:
        for step in range(until):
            writer.publish(step, 0, weights_at(step, seed=9))
    version = newest(holding)
    assert same(version.tensors, weights_at(until - 1, seed=9))
    version.apply(model)
    found = {name: Tensor.of_torch(tensor) for name, tensor in model.items()}
    assert same(found, weights_at(until - 1, seed=9))


def test_the_same_without_a_look_in_between(tmp_path: Path) -> None:
    target = tmp_path / "target"
    published(target, range(4))
    holding = Subscriber(target)
    newest(holding)
    shutil.rmtree(target)
    with VersionWriter(FolderTarget(target), "run") as writer:
        for step in range(5):
            writer.publish(step, 0, weights_at(step, seed=9))
    assert same(newest(holding).tensors, weights_at(4, seed=9))


def test_a_target_belongs_to_one_run(tmp_path: Path) -> None:
    published(tmp_path, [1])
    with pytest.raises(RunMismatch, match="holds the weights of run 'run', and this is run other"):
        VersionWriter(FolderTarget(tmp_path), "other")


def test_a_second_publisher_is_refused_by_name(tmp_path: Path) -> None:
    with (
        VersionWriter(FolderTarget(tmp_path), "run"),
        pytest.raises(RunInUse, match=f"process {os.getpid()}"),
    ):
        VersionWriter(FolderTarget(tmp_path), "run")
    published(tmp_path, [1])


def test_a_second_publisher_to_a_store_is_named_to_the_first(server: S3Server) -> None:
    place = server.url("two")
    first = VersionWriter(target_of(place), "run")
    first.publish(1, 0, weights_at(1))
    second = VersionWriter(target_of(place), "run")
    made = second.publish(2, 0, weights_at(2))
    with pytest.raises(RunInUse, match=made.publisher):
        first.publish(2, 0, weights_at(2))
    assert second.publish(3, 0, weights_at(3)).base == made.version


@pytest.mark.slow
def test_a_publisher_that_dies_at_any_moment_leaves_whole_versions(tmp_path: Path) -> None:
    # Anchors, deltas and removals: 5 versions, and a withdrawal.
    for left in range(60):
        folder = tmp_path / str(left)
        known: list[int] = []
        target = Ending(folder, left)
        watching = Subscriber(folder)
        try:
            with VersionWriter(target, "run", anchor_every=2, keep_anchors=1) as writer:
                for step in range(5):
                    known.append(step)
                    writer.publish(step, 0, weights_at(step))
                writer.withdraw(lambda made: made.step > 3)
                known.append(4)
                writer.publish(4, 1, weights_at(4, seed=1))
        except StorageError:
            pass
        for subscriber in (watching, Subscriber(folder)):
            version = subscriber.newest()
            if version is not None:
                assert same(version.tensors, weights_at(version.step, seed=version.incarnation))
        held = watching.version
        with VersionWriter(FolderTarget(folder), "run", anchor_every=2, keep_anchors=1) as writer:
            made = writer.publish(9, 2, weights_at(9, seed=2))
        assert held is None or made.version > held.number
        for subscriber in (watching, Subscriber(folder)):
            assert same(newest(subscriber).tensors, weights_at(9, seed=2))
        whole = {path.stem[:11] for path in folder.glob("v*.json")}
        assert {path.name[:11] for path in folder.glob("v*")} == whole
    assert target.left > 0, "it did not come to the end"


@pytest.mark.slow
def test_no_flipped_byte_is_taken(tmp_path: Path) -> None:
    published(tmp_path, range(4), anchor_every=10)
    expected = {step: weights_at(step) for step in range(4)}
    dice = random.Random(5)
    for path in sorted(tmp_path.glob("v*")):
        data = path.read_bytes()
        for at in dice.sample(range(len(data)), min(len(data), 40)):
            bad = bytearray(data)
            bad[at] ^= 1 << dice.randrange(8)
            path.write_bytes(bad)
            version = Subscriber(tmp_path).newest()
            assert version is None or same(version.tensors, expected[version.step])
        path.write_bytes(data)


def test_after_a_damaged_change_the_next_anchor_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subscriber = Subscriber(tmp_path)
    with VersionWriter(FolderTarget(tmp_path), "run", anchor_every=3) as writer:
        writer.publish(0, 0, weights_at(0))
        newest(subscriber)
        made = writer.publish(1, 0, weights_at(1))
        part = tmp_path / f"v{made.version:010d}-p0000.safetensors"
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
        assert subscriber.newest() is None
        assert "LD612: version 2 is passed over" in caplog.text
        writer.publish(2, 0, weights_at(2))
        assert subscriber.newest() is None
        assert subscriber.version is not None
        assert same(subscriber.version.tensors, weights_at(0))
        writer.publish(3, 0, weights_at(3))
        assert same(newest(subscriber).tensors, weights_at(3))


def test_a_model_gets_all_first_and_then_what_changed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = nn.Linear(30, 20)
    source = nn.Sequential(first, nn.BatchNorm1d(20)).bfloat16()
    subscriber = Subscriber(tmp_path)
    model, late = (nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20)) for _ in range(2))
    with VersionWriter(FolderTarget(tmp_path), "run") as writer:
        for step in range(5):
            with torch.no_grad():
                first.weight[step] += 0.25
            weights = {name: Tensor.of_torch(t) for name, t in source.state_dict().items()}
            writer.publish(step, 0, weights)
            version = newest(subscriber)
            assert version.changed == ({"0.weight"} if step else set(weights))
            version.apply(model)
            if step % 2:
                version.apply(late)  # lacks the version before
            for mine in (model, late) if step % 2 else (model,):
                for name, tensor in mine.state_dict().items():
                    assert torch.equal(tensor, source.state_dict()[name].to(tensor.dtype))
            arrays = {name: tensor.numpy() for name, tensor in late.state_dict().items()}
            version.apply(arrays)
            assert torch.equal(late.state_dict()["0.weight"], first.weight.float())
    saved = version.save(tmp_path / "model.safetensors")
    from safetensors.torch import load_file

    assert all(torch.equal(t, source.state_dict()[n]) for n, t in load_file(saved).items())
    assert all(torch.equal(t, source.state_dict()[n]) for n, t in version.state_dict().items())


def test_a_model_that_does_not_fit_is_left_as_it_is(tmp_path: Path) -> None:
    published(tmp_path, [1])
    version = newest(Subscriber(tmp_path))
    zeros = {name: torch.zeros(own.shape) for name, own in weights_at(1).items()}
    for wrong, said in (
        ({**zeros, "embedding": torch.zeros(8, 50)}, r"embedding has shape \(8, 50\) in the model"),
        ({**zeros, "more": torch.zeros(1)}, r"1 tensors that were not published \(more\)"),
        ({k: v for k, v in zeros.items() if k != "count"}, r"lacks 1 \(count\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            version.apply(wrong)
        assert not any(bool(tensor.any()) for tensor in wrong.values())


def test_the_tensors_of_a_version_cannot_be_written_to(tmp_path: Path) -> None:
    published(tmp_path, [1])
    version = newest(Subscriber(tmp_path))
    with pytest.raises(ValueError, match="read-only"):
        version.tensors["embedding"].bits[0] = 1
    version.state_dict()["embedding"].zero_()
    assert same(version.tensors, weights_at(1))


def test_an_iteration_waits_for_a_target_and_ends_with_the_last_version(tmp_path: Path) -> None:
    def publish() -> None:
        time.sleep(0.3)
        published(tmp_path / "later", range(20))

    thread = threading.Thread(target=publish)
    thread.start()
    steps = []
    for version in Subscriber(tmp_path / "later", look_seconds=0.02, idle_seconds=5):
        assert same(version.tensors, weights_at(version.step))
        steps.append(version.step)
        if version.step == 19:
            break
    thread.join()
    assert steps == sorted(set(steps))
    assert list(Subscriber(tmp_path / "never", look_seconds=0.01, idle_seconds=0.02)) == []


@given(
    actions=st.lists(
        st.sampled_from(["publish", "read", "anew", "withdraw", "fresh"]), max_size=25
    ),
    every=st.integers(1, 5),
    keep=st.integers(1, 3),
)
def test_any_order_of_events(
    tmp_path_factory: pytest.TempPathFactory, actions: list[str], every: int, keep: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    target = FolderTarget(folder)
    step = incarnation = 0
    subscriber = Subscriber(folder)
    used: set[int] = set()
    writer = VersionWriter(target, "run", anchor_every=every, keep_anchors=keep)
    published_last: Manifest | None = None
    for action in actions:
        if action == "publish":
            step += 1
            published_last = writer.publish(step, incarnation, weights_at(step, seed=incarnation))
            assert published_last.version not in used
            used.add(published_last.version)
        elif action == "anew":
            writer.close()
            writer = VersionWriter(target, "run", anchor_every=every, keep_anchors=keep)
        elif action == "withdraw" and step > 1:
            step -= 2
            incarnation += 1
            back, now = step, incarnation
            writer.withdraw(lambda m: m.incarnation < now and m.step > back)  # noqa: B023
            published_last = None
        elif action == "fresh":
            subscriber = Subscriber(folder)
        if action in ("read", "fresh"):
            version = subscriber.newest()
            if version is not None:
                assert same(version.tensors, weights_at(version.step, seed=version.incarnation))
            if published_last is not None:
                assert subscriber.version is not None
                assert subscriber.version.number == published_last.version
    writer.close()


@pytest.mark.slow
@given(st.data())
def test_a_strangers_manifest_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "strangers"
    if not folder.exists():
        published(folder, range(2))
    name = manifest_name(2)
    document = json.loads((folder / name).read_text())
    del document["crc32c"]
    key = data.draw(st.sampled_from(sorted(document)))
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.text(max_size=5) | st.floats(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=5,
    )
    document[key] = data.draw(json_values)
    from lowdiff.persistence.format.document import json_bytes

    content = {k: v for k, v in document.items() if k != "format"}
    if key == "format":
        content["step"] = document["format"]
    try:
        made = Manifest.of_bytes(json_bytes(content), 2, name)
    except LowDiffError:
        return
    assert type(made.step) is int
    assert all(type(size) is int for size in made.parts)


def test_a_strangers_files_are_not_followed(tmp_path: Path) -> None:
    published(tmp_path / "target", range(2))
    secret = tmp_path / "secret"
    secret.write_text("mine")
    part = tmp_path / "target" / "v0000000002-p0000.safetensors"
    makers: list[Callable[[], None]] = [
        lambda: part.symlink_to(secret),
        lambda: os.mkfifo(part),
        lambda: part.symlink_to("/dev/zero"),
        part.mkdir,
    ]
    for make in makers:
        if part.is_dir():
            part.rmdir()
        else:
            part.unlink()
        make()
        assert same(newest(Subscriber(tmp_path / "target")).tensors, weights_at(0))


def test_following_needs_no_torch(tmp_path: Path) -> None:
    published(tmp_path, range(3))
    script = (
        "import sys, numpy as np\n"
        "from lowdiff.persistence.versions.subscriber import Subscriber\n"
        f"version = Subscriber({str(tmp_path)!r}).newest()\n"
        "arrays = {n: np.zeros(t.shape, 'float32') for n, t in version.tensors.items()}\n"
        "version.apply(arrays)\n"
        "assert arrays['embedding'].any()\n"
        "version.save(sys.argv[1])\n"
        "assert 'torch' not in sys.modules\n"
        "print(version)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out.safetensors")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "version 3 (step 2)\n", done.stderr


PUBLISH = """
import sys
from tests.unit.persistence.versions.made import *
with VersionWriter(FolderTarget(Path(sys.argv[1])), "run", anchor_every=5, wait_seconds=5) as writer:
    newest = writer.newest()
    step = 0 if newest is None else newest.step
    while True:
        step += 1
        writer.publish(step, 0, weights_at(step % 50))
        print(step, flush=True)
"""
FOLLOW = """
import sys
from lowdiff.persistence.versions.subscriber import Subscriber
from tests.unit.persistence.versions.made import *
for version in Subscriber(sys.argv[1], look_seconds=0.002):
    assert same(version.tensors, weights_at(version.step % 50)), version
    print(version.step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.launch
def test_both_are_killed_at_random(tmp_path: Path) -> None:
    dice = random.Random(random.randrange(1 << 32))
    seen = 0
    for _ in range(6):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(tmp_path / "target")],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for script in (PUBLISH, FOLLOW)
        ]
        follower = processes[1]
        assert follower.stdout is not None
        assert follower.stdout.readline(), follower.stderr and follower.stderr.read()
        time.sleep(dice.uniform(0, 0.5))
        for process in dice.sample(processes, 2):
            assert process.poll() is None, process.stderr and process.stderr.read()
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.communicate()
        version = newest(Subscriber(tmp_path / "target"))
        assert version.step >= seen
        assert same(version.tensors, weights_at(version.step % 50))
        seen = version.step
    assert seen > 6


def test_numpy_takes_bfloat16_as_other_floats() -> None:
    made = Tensor.of_torch(torch.tensor([[1.5, -0.25, float("inf")]]).bfloat16())
    assert made.to_numpy("float32").tolist() == [[1.5, -0.25, float("inf")]]
    assert made.to_numpy(np.float64).dtype == np.float64
    narrow = Tensor.of_torch(torch.tensor([1.0]).to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="NumPy has no float8_e4m3fn"):
        narrow.to_numpy("float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_dtype_that_is_published_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {"a": Tensor.of_torch(torch.randn(16, 4).to(dtype))}
    with VersionWriter(FolderTarget(tmp_path), "run") as writer:
        writer.publish(1, 0, weights)
    version = Subscriber(tmp_path).newest()
    assert version is not None
    (found,) = version.tensors.values()
    assert np.array_equal(found.bits, weights["a"].bits)
