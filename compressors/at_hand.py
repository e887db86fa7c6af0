"""What reducers have in common whose payloads can be made as soon as the optimizer has stepped."""

from __future__ import annotations

from collections.abc import Collection

from typing_extensions import Self


class AtHand:
    """A reducer that is its own ``Departed``: what it read lies on the host, or is waited for by ``payload``."""

    @property
    def is_here(self) -> bool:
        """See ``Departed``."""
        return True

    @property
    def has_missed(self) -> bool:
        """See ``Departed``: what was changed was noticed while it was there."""
        return False

    def depart(self) -> Self:
        """See ``Reducer.depart``."""
        return self

    def skip(self, parameters: Collection[int]) -> None:
        """Do nothing: replay skips the step as well. See ``Reducer.skip``."""
