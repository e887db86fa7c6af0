"""A loop body on a stream of the user's, which the stream of the commits does not wait for.

`Device` stands for the accelerator: what no stream waits for is done last.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowdiff.host_copy
from lowdiff.compressors.dense import kept_until_read
from lowdiff.host_copy import HostCopies
from tests.face.streams import Device, Stream, Tensor


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(lowdiff.host_copy, "torch", made)
    return made


def test_a_buffer_that_bodies_on_another_stream_write_is_copied_as_it_was_committed(
    streams: Device,
) -> None:
    copies = HostCopies(torch.device("cuda"))
    commits, bodies = streams.current, Stream()
    buffer: Any = Tensor(streams, 0)
    streams.current = bodies
    copies.hold()
    buffer.fill_(1)
    streams.current = commits
    found: Any = copies.fetch_copy(buffer)
    streams.current = bodies
    buffer.fill_(2)
    bodies.synchronize()
    copies.wait()
    assert found.value == 1


@pytest.mark.parametrize("packed", [False, True], ids=["as they are", "packed when committed"])
def test_gradients_kept_on_another_stream_are_copied_once_they_are_there(
    streams: Device, packed: bool
) -> None:
    copies = HostCopies(torch.device("cuda"))
    commits, streams.current = streams.current, Stream()
    gradient: Any = Tensor(streams, 0)
    gradient.fill_(1)
    copies.hold()
    kept = kept_until_read(gradient)
    streams.current = commits
    copies.follow()
    found: Any = copies.fetch(kept.clone() if packed else kept)
    copies.wait()
    assert found.value == 1
