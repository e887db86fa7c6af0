"""What a rank tells those that keep its copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from lowdiff.persistence.format.differentials import encode_scalars
from lowdiff.persistence.format.values import decode, encode
from lowdiff.step.states import Sealed
from lowdiff.types import Section


@dataclass(frozen=True, slots=True)
class Note:
    """One step's message of a rank to those that keep its copies. Bytes of sections follow it.

    Attributes:
        step: The step.
        rebases: Whether it cannot be replayed.
        scalars: Of its record, encoded; with the items that changed.
        sections: What keepers cannot make themselves: name, coding, dtype and bytes of each section of the record.
        checksum: CRC-32C of the record's body; 0 where steps are not logged.
        items: All items, at the beginning of an incarnation alone.
    """

    step: int
    rebases: bool
    scalars: bytes
    sections: list[tuple[str, str, str, int]]
    checksum: int
    items: dict[str, bytes]

    @classmethod
    def of(
        cls,
        sealed: Sealed,
        checksum: int,
        items: Mapping[str, bytes],
        sections: Sequence[Section],
    ) -> Note:
        """Describe a step that this rank has staged."""
        record = sealed.differential
        return cls(
            step=record.step,
            rebases=sealed.rebases,
            scalars=encode_scalars(record),
            sections=[(s.name, s.coding, s.data.dtype.str, s.data.nbytes) for s in sections],
            checksum=checksum,
            items=dict(items),
        )

    def encoded(self) -> bytes:
        """Return the message; the inverse of `read`."""
        return encode(asdict(self))

    @classmethod
    def read(cls, message: bytes) -> Note:
        """Decode a message that came with its checksum."""
        return cls(**decode(message))

    def empty_sections(self) -> list[Section]:
        """Return its sections with memory for their values, which nobody has written yet."""
        return [
            Section(name, coding, np.empty(size // np.dtype(dtype).itemsize, np.dtype(dtype)))
            for name, coding, dtype, size in self.sections
        ]
