"""What reducers have in common whose payloads can be made as soon as the optimizer has stepped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from lowdiff.protocols import Departed
from lowdiff.types import Payload


class AtHand(ABC):
    """A reducer of which what it read lies on the host, or is waited for by ``payload``."""

    def depart(self) -> Departed:
        """See ``Reducer.depart``."""
        return _Here(self)

    @abstractmethod
    def payload(self, of: int | None = None) -> Payload:
        """See ``Reducer.payload``."""

    def skip(self, parameters: Collection[int]) -> None:  # noqa: B027  by default nothing is undone
        """Do nothing: replay skips the step as well. See ``Reducer.skip``."""


@dataclass(frozen=True, slots=True)
class _Here:
    """A ``Departed`` that does not travel; what was changed was noticed while it was there."""

    reducer: AtHand
    travels: ClassVar[bool] = False
    has_missed: ClassVar[bool] = False

    def payload(self, of: int | None = None) -> Payload:
        """See ``Departed``."""
        return self.reducer.payload(of)

    def learn(self) -> None:
        """See ``Departed``: nothing was missed."""
