"""Parts of a sealed step that are on their way from an accelerator: each makes the step whole once it is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowdiff.model.device_watch import Looks
from lowdiff.protocols import Arriving, Departed
from lowdiff.step.states import Change, Sealed


@dataclass(frozen=True, slots=True, eq=False)
class LatePayload:
    """What the optimizers consumed; whether a payload lacks anything is known once it has arrived.

    Attributes:
        departed: As the reducer had it depart.
        peers: Ranks of which payloads are made as well.
    """

    departed: Departed
    peers: Sequence[int]

    def complete(self, sealed: Sealed) -> Sealed:
        """See `Late`."""
        departed = self.departed
        payload = departed.payload()
        of_peers = {rank: departed.payload(rank) for rank in self.peers}
        missed = {Change.GRADIENT_MISSED} if departed.has_missed else set()
        return replace(
            sealed,
            differential=replace(sealed.differential, payload=payload),
            changes=sealed.changes | missed,
            of_peers=of_peers,
        )


@dataclass(frozen=True, slots=True, eq=False)
class LateResidual:
    """The copy of this rank's residual that the record names.

    Attributes:
        copy: On its way to staging.
    """

    copy: Arriving

    def complete(self, sealed: Sealed) -> Sealed:
        """See `Late`."""
        self.copy.arrive()
        return sealed


@dataclass(frozen=True, slots=True, eq=False)
class LateLooks:
    """Checksums, and whether something else than optimizers wrote to parameters.

    Attributes:
        looks: Of the step.
    """

    looks: Looks

    def complete(self, sealed: Sealed) -> Sealed:
        """See `Late`."""
        seen, has_written = self.looks.arrived()
        return replace(
            sealed,
            differential=replace(
                sealed.differential,
                digests=seen.digests,
                state_digests=seen.states,
                averages=seen.averages,
            ),
            changes=sealed.changes | ({Change.OUTSIDE} if has_written else set()),
        )
