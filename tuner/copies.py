"""Copies of a planned job in the memory of other nodes: what they survive, send and take.

Formulae are in docs/tuning.md. Reference: Wang et al., "GEMINI: Fast Failure Recovery in Distributed
Training with In-Memory Checkpoints", SOSP 2023, whose copies are sent.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from lowdiff.core.placement import survival_probability
from lowdiff.tuner.plan import Job
from lowdiff.tuner.units import readable_bytes

#: What a rank sends of a step to one node where all generators of its process moved, and no buffer and no
#: stateful object changed: states of Python's, NumPy's and PyTorch's generators, and the step's numbers.
#: Measured with 200 parameter tensors (docs/tuning.md).
ITEMS_BYTES = 12.4e3
#: Images of another rank's share that a copy holds: two take turns.
_IMAGES_PER_COPY = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Staging memory of one node for images and replicas, by strategy, in bytes.

    Attributes:
        log: Images of shares, without residuals.
        replica: Replicas and images.
        replica_state: The part of it that is the replicas' state.
    """

    log: float
    replica: float
    replica_state: float


@dataclass(frozen=True, slots=True)
class Survival:
    """How likely memory alone brings everything back.

    Attributes:
        lost_nodes: Nodes that are lost at once.
        probability: All sets of so many nodes being equally likely.
    """

    lost_nodes: int
    probability: Fraction


@dataclass(frozen=True, slots=True)
class PlannedCopies:
    """What ``Checkpointer(copies=...)`` gives a planned job.

    Attributes:
        copies: On how many nodes everything lies, its own included.
        nodes: Number of nodes.
        survival: For one lost node, as many as there are copies, and one more.
        sent_bytes: What a rank sends in each step, to all nodes that hold it.
        gemini_sent_bytes: Likewise, with Gemini.
        residual_bytes: A rank's residual, which has no copy.
        memory_bytes: Of one node.
    """

    copies: int
    nodes: int
    survival: tuple[Survival, ...]
    sent_bytes: float
    gemini_sent_bytes: float
    residual_bytes: float
    memory_bytes: Memory

    def document(self) -> dict[str, Any]:
        """Return JSON content."""
        survival = [
            {"lost_nodes": one.lost_nodes, "probability": float(one.probability)}
            for one in self.survival
        ]
        return {**asdict(self), "survival": survival}


def planned_copies(job: Job, copies: int) -> PlannedCopies:
    """Compute what copies survive, send and take.

    Raises:
        ConfigError: If there are fewer nodes than copies.
    """
    nodes, others = job.num_nodes, copies - 1
    lost = sorted({1, copies, min(copies + 1, nodes)})
    share = job.state_bytes / job.gpus
    on_node = share * job.ranks_per_node
    images = on_node * (1 + _IMAGES_PER_COPY * others)
    return PlannedCopies(
        copies=copies,
        nodes=nodes,
        survival=tuple(Survival(k, survival_probability(nodes, copies, k)) for k in lost),
        sent_bytes=ITEMS_BYTES * others,
        gemini_sent_bytes=share * others,
        residual_bytes=job.residual_bytes,
        memory_bytes=Memory(
            log=images,
            # Of each rank the state and an image of it; of the node's own also the trainer's image.
            replica=on_node * (1 + 2 * copies),
            replica_state=on_node * copies,
        ),
    )


def copies_title(found: PlannedCopies) -> str:
    """Return a heading."""
    return f"Copies on {found.copies:,} of {found.nodes:,} nodes"


def copies_facts(found: PlannedCopies) -> list[tuple[str, str]]:
    """Return the figures as text."""
    memory = found.memory_bytes
    first, *more = found.survival
    likely = [f"1 node lost: {_percent(first.probability)}"]
    likely += [f"{one.lost_nodes:,} at once: {_percent(one.probability)}" for one in more]
    sent, gemini, residual, log, replica, state = map(
        readable_bytes,
        (
            found.sent_bytes,
            found.gemini_sent_bytes,
            found.residual_bytes,
            memory.log,
            memory.replica,
            memory.replica_state,
        ),
    )
    return [
        ("memory alone brings all back", "; ".join(likely)),
        (
            "sent per step and rank",
            f"{sent}: numbers and generators; buffers and objects that change are more",
        ),
        ("with Gemini", f"{gemini}: the rank's share of the whole state"),
        (
            "not copied",
            f"the residual, {residual} of each rank: lost with its node, and attach says so",
        ),
        ("memory of a node, log", f"{log} of images; residuals and logs are more"),
        (
            "memory of a node, replica",
            f"{replica}, of it {state} state of replicas; queues are more",
        ),
    ]


def _percent(probability: Fraction) -> str:
    """Format a probability; only what is certain is 100 %."""
    if probability in (0, 1):
        return f"{int(probability):.0%}"
    return "over 99.99%" if round(probability, 4) == 1 else f"{float(probability):.2%}"
