"""Frozen parameters are stored once, and what a kill leaves of them goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.image import ImageTensor
from lowdiff.persistence.run.frozen_parameters import (
    check_constants,
    sweep_constants,
    write_constants,
)

TENSORS = [ImageTensor("frozen/w", "U8", (4,), memoryview(b"data"))]


def test_what_a_kill_leaves_of_them_goes_and_they_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    sweep_constants(folder)  # nothing yet
    content_hash = write_constants(folder, TENSORS)
    whole = folder.constants(content_hash)
    for name in ("0123abcd", "4711"):  # of an attach, and of a fetch
        whole.with_name(f"{whole.name}.{name}.partial").write_bytes(b"half")
    sweep_constants(folder)
    assert list(whole.parent.iterdir()) == [whole]
    assert check_constants(folder, content_hash) == whole
    whole.write_bytes(b"others")
    with pytest.raises(DamagedFile, match="hash that is its name"):
        check_constants(folder, content_hash)
