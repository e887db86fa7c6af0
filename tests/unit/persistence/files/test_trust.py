"""Staging that another user of the machine made, or could write to, is refused or left unread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowdiff
from lowdiff.errors import UntrustedStaging
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.files.trust import make_folder
from lowdiff.recovery.inspect.inspection import inspect
from lowdiff.recovery.inspect.verify import verify
from tests.unit.loops import Loop

RUN = "0" * 32
STRANGER = 61234

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_stranger(command_line: str, place: Path) -> None:
    """Run a command line as another user of this machine, with the place as ``$1``."""
    command = ["sh", "-ec", f"umask 0; {command_line}", "sh", str(place)]
    subprocess.run(command, check=True, user=STRANGER, group=STRANGER, extra_groups=[], cwd="/")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /dev/shm: everybody makes files there, and removes none of others."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own no other user can reach
        Path(folder).chmod(0o1777)
        yield Path(folder)


MADE = {
    "folder": ('mkdir "$1"', "belongs to user 61234"),
    "link": (
        'mkdir "$1-theirs"; ln -s "$1-theirs" "$1"',
        "is a symbolic link, made by user 61234",
    ),
    "planted": (f'mkdir -p "$1/{RUN}/i000000-r0000"', "belongs to user 61234"),
}


@pytest.mark.parametrize("what", MADE)
def test_a_root_that_somebody_else_made_first_is_refused_by_attach(
    shared: Path, tmp_path: Path, what: str
) -> None:
    code, why = MADE[what]
    root = shared / "lowdiff-0"
    as_stranger(code, root)
    before = sorted(shared.rglob("*"))
    loop = Loop(tmp_path, settings={"staging": root})
    with pytest.raises(UntrustedStaging, match=why) as caught:
        loop.attach()
    assert caught.value.path == root
    assert "Checkpointer(..., staging=FOLDER)" in str(caught.value)
    assert sorted(shared.rglob("*")) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.cases(2)
@pytest.mark.parametrize("what", MADE)
def test_readers_go_on_with_the_disk_and_say_so(
    shared: Path, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    loop.run(6)
    code, why = MADE[what]
    run_id = json.loads((tmp_path / "run/run.json").read_text())["run_id"]
    as_stranger(code.replace(RUN, run_id), root := shared / "lowdiff-0")
    found = inspect(tmp_path / "run", root)
    assert found.recoverable is not None
    assert found.recoverable.last == 6
    assert verify(tmp_path / "run", root).ok
    assert lowdiff.recover(tmp_path / "run", staging=root).step == 6
    said = [record.getMessage() for record in caplog.records if "only the disk" in record.message]
    assert len(said) >= 3
    assert all(why in text for text in said)


def test_a_folder_planted_in_a_root_of_ones_own_is_not_read(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = shared / "lowdiff-0"
    make_folder(root, RUN, "i000000-r0000")
    mine = StagingFolder.all_of_run(root, RUN)
    assert [stage.root.name for stage in mine] == ["i000000-r0000"]
    root.chmod(0o777)
    (root / RUN).chmod(0o777)
    as_stranger('mkdir "$1"', root / RUN / "i000001-r0000")
    as_stranger('ln -s / "$1"', root / RUN / "i000002-r0000")
    as_stranger('mkdir "$1"', root / ("1" * 32))
    root.chmod(0o755)
    (root / RUN).chmod(0o700)
    assert StagingFolder.all_of_run(root, RUN) == mine
    assert list(StagingFolder.all(root)) == mine
    text = caplog.text
    assert "i000001-r0000 is not read: it belongs to user 61234" in text
    assert "i000002-r0000 is not read: it is a symbolic link" in text
    assert f"{'1' * 32} belongs to user 61234" in text
    with pytest.raises(UntrustedStaging, match="belongs to user 61234"):
        make_folder(root, "1" * 32, "i000000-r0000")


def test_a_given_folder_may_be_read_by_others_and_not_written(tmp_path: Path) -> None:
    root = tmp_path / "given"
    root.mkdir(mode=0o755)
    loop = Loop(tmp_path, settings={"staging": root})
    loop.attach()
    (below,) = root.iterdir()
    modes = {path.stat().st_mode & 0o777 for path in [below, *below.iterdir()]}
    assert modes == {0o700}
    loop.checkpointer.close()
    for mode in (0o775, 0o757, 0o1777):  # the last as a tmpfs is mounted
        root.chmod(mode)
        with pytest.raises(
            UntrustedStaging, match=rf"has mode {mode:04o}, so .*give a new folder in it"
        ):
            loop.attach()


def test_the_default_root_is_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "lowdiff-0"
    monkeypatch.setattr("lowdiff.persistence.files.trust.shared_staging_root", lambda: root)
    old = os.umask(0)
    try:
        make_folder(root, RUN, "i000000-r0000")
    finally:
        os.umask(old)
    assert root.stat().st_mode & 0o777 == 0o700
    # As an earlier version made it: others could read it, and did not write to it.
    root.chmod(0o755)
    make_folder(root, RUN, "i000001-r0000")
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o777)
    with pytest.raises(UntrustedStaging, match="has mode 0777"):
        make_folder(root, RUN, "i000002-r0000")


@pytest.mark.slow
def test_gc_of_a_folder_of_somebody_else_is_an_error(shared: Path) -> None:
    root = shared / "lowdiff-0"
    as_stranger('mkdir "$1"', root)
    command = [sys.executable, "-m", "lowdiff", "gc", "--staging", "--staging-folder", str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "belongs to user 61234" in result.stderr
