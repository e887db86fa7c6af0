"""Every store keeps the same promises; what it cannot do is a named error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowdiff.errors import ConfigError, StoreError
from lowdiff.persistence.store.client import ObjectStore, is_url
from tests.unit.persistence.s3_server import S3Server, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as made:
        yield made


@pytest.fixture(params=["s3", "file"])
def store(request: pytest.FixtureRequest, server: S3Server, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return ObjectStore(f"file://{tmp_path}/a/run", make=True)
    return ObjectStore(server.url(f"contract/{tmp_path.name}"))


def test_an_object_is_created_once(store: ObjectStore) -> None:
    assert store.create("segments/rank-0000/a.seg", b"first")
    assert not store.create("segments/rank-0000/a.seg", b"second")
    assert store.read("segments/rank-0000/a.seg") == b"first"


def test_sizes_are_by_name_below_a_folder(store: ObjectStore) -> None:
    store.create("run.json", b"{}")
    store.create("segments/rank-0001/a.seg", b"12345")
    store.create("segments/rank-00010/a.seg", b"another folder with the same beginning")
    assert store.sizes("segments/rank-0001") == {"segments/rank-0001/a.seg": 5}
    assert set(store.sizes()) > {"run.json"}


@pytest.mark.slow
def test_a_large_file_goes_up_in_parts_and_comes_back_by_ranges(
    store: ObjectStore, tmp_path: Path
) -> None:
    data = bytes(range(256)) * (20 * 4096)  # 20 MiB: three parts
    file = tmp_path / "shard"
    file.write_bytes(data)
    store.upload("shard", file)
    store.upload("shard", file)  # also in place of an older one
    assert store.sizes() == {"shard": len(data)}
    assert store.read_range("shard", 9_000_000, 9_000_100) == data[9_000_000:9_000_100]
    assert store.read("shard") == data


def test_deleting_is_idempotent(store: ObjectStore) -> None:
    store.create("a", b"1")
    store.create("b", b"2")
    store.delete(["a", "was never there"])
    store.delete([])
    assert store.sizes() == {"b": 1}


def test_what_is_not_there_is_missing(store: ObjectStore) -> None:
    with pytest.raises(StoreError, match="reading nothing failed") as caught:
        store.read("nothing")
    assert caught.value.is_missing


def test_a_bucket_that_is_not_there_is_named(server: S3Server) -> None:
    store = ObjectStore("s3://no-such-bucket/run")
    for request in (lambda: store.sizes(), lambda: store.create("a", b"")):
        with pytest.raises(StoreError, match=r"NoSuchBucket.*check the URL") as caught:
            request()
        assert caught.value.is_refused


def test_a_refusal_says_what_to_check(server: S3Server) -> None:
    server.refused = lambda method, name: True
    try:
        with pytest.raises(StoreError, match=r"AccessDenied.*credentials") as caught:
            ObjectStore(server.url("refused")).create("a", b"")
    finally:
        server.refused = lambda method, name: False
    assert caught.value.is_refused
    assert not caught.value.is_missing


def test_a_server_that_is_away_is_no_refusal(server: S3Server) -> None:
    store = ObjectStore(server.url("away"))
    with server.away(), pytest.raises(StoreError, match="error sending request") as caught:
        store.read("run.json")
    assert not caught.value.is_refused
    assert not caught.value.is_missing


def test_throttling_is_waited_out(server: S3Server) -> None:
    answers = iter([True, False, True, True, False, False])
    server.throttled = lambda method, name: next(answers)
    try:
        store = ObjectStore(server.url("throttled"))
        assert store.create("a", b"1")
        assert store.read("a") == b"1"
    finally:
        server.throttled = lambda method, name: False
    assert list(answers) == [False]


@pytest.mark.parametrize("url", ["ftp://host/run", "memory:///run", "s3://", "runs/gpt"])
def test_a_url_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="store="):
        ObjectStore(url)


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        ObjectStore(f"file://{tmp_path}/nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match="pip install obstore"):
        ObjectStore("s3://bucket/run")


def test_only_urls_are_urls(tmp_path: Path) -> None:
    assert is_url("s3://bucket/run")
    assert not is_url("runs/gpt")
    assert not is_url(tmp_path)
