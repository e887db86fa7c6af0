"""Which feature of which framework is resumed exactly: the table of docs/integrations.md, and what shows each cell.

Names no framework's module, so that the table is written without any: ``python -m tests.integrations.matrix``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs/integrations.md"
_BEGIN, _END = "<!-- features -->", "<!-- end of features -->"


@dataclass(frozen=True)
class Exact:
    """A cell that is exact.

    Attributes:
        kinds: Names in ``KINDS`` of the framework's ``training.py``; each is killed at three places or more.
    """

    kinds: tuple[str, ...]

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class Refused:
    """A cell that is refused by name at the start.

    Attributes:
        test: Module below ``tests/integrations/FRAMEWORK``, and the test that shows it.
        instead: What works.
    """

    test: tuple[str, str]
    instead: str = ""

    def __str__(self) -> str:
        return f"refused; {self.instead}" if self.instead else "refused"


@dataclass(frozen=True)
class Absent:
    """A cell that the framework does not have.

    Attributes:
        why: In place of it.
    """

    why: str

    def __str__(self) -> str:
        return self.why


Cell = Exact | Refused | Absent

_BY_NAME = "test_resume", "test_what_cannot_be_resumed_is_refused_by_name_before_the_first_step"

#: Feature -> framework -> cell.
MATRIX: Mapping[str, Mapping[str, Cell]] = {
    "averages of the weights": {
        "transformers": Exact(("average",)),
        "lightning": Exact(("average", "average as is", "hooks")),
        "accelerate": Exact(("average",)),
    },
    "stochastic weight averaging": {
        "transformers": Absent("has none"),
        "lightning": Refused(_BY_NAME, "`WeightAveraging` with `SWALR`"),
        "accelerate": Exact(("stochastic",)),
    },
    "layers thawed by the step's number": {
        "transformers": Exact(("thaws by number",)),
        "lightning": Exact(("thaws by number",)),
        "accelerate": Exact(("thaws by number",)),
    },
    "layers thawed in new groups": {
        "transformers": Absent("has none"),
        "lightning": Refused(_BY_NAME, "all groups at once, thawed by the step's number"),
        "accelerate": Absent("has none"),
    },
    "accumulation, also with a shorter last step": {
        "transformers": Exact(("epochs",)),
        "lightning": Exact(("epochs",)),
        "accelerate": Exact(("accumulated", "by hand")),
    },
    "validation in mid-epoch": {
        "transformers": Exact(("steps",)),
        "lightning": Exact(("steps", "plateau")),
        "accelerate": Exact(("evaluates",)),
    },
    "early stopping": {
        "transformers": Exact(("stops early",)),
        "lightning": Exact(("stops early",)),
        "accelerate": Exact(("stops early",)),
    },
    "best model kept, or loaded at the end": {
        "transformers": Exact(("epochs", "stops early")),
        "lightning": Exact(("steps", "epochs")),
        "accelerate": Absent("has none"),
    },
    "worker processes": {
        "transformers": Exact(("workers",)),
        "lightning": Exact(("workers",)),
        "accelerate": Exact(("workers", "fresh workers")),
    },
    "iterable datasets": {
        "transformers": Refused(
            ("test_callback", "test_a_loader_that_cannot_be_resumed_is_refused")
        ),
        "lightning": Refused(("test_callback", "test_what_cannot_be_resumed_is_refused")),
        "accelerate": Refused(("test_run", "test_a_loader_without_a_place_is_refused")),
    },
    "several optimizers": {
        "transformers": Absent("has one"),
        "lightning": Exact(("gan",)),
        "accelerate": Exact(("two optimizers",)),
    },
    "`torch.compile` (backend `eager`)": {
        "transformers": Exact(("compiled",)),
        "lightning": Exact(("compiled",)),
        "accelerate": Exact(("compiled",)),
    },
    "bf16": {
        "transformers": Exact(("bf16 by length",)),
        "lightning": Exact(("short epochs",)),
        "accelerate": Exact(("accumulated",)),
    },
    "without a compressor": {
        "transformers": Exact(("replica",)),
        "lightning": Exact(("replica", "average as is", "gan")),
        "accelerate": Exact(("replica",)),
    },
}

#: Framework -> how the table calls it.
FRAMEWORKS = {"transformers": "Transformers", "lightning": "Lightning", "accelerate": "Accelerate"}


def table() -> str:
    """Return the table."""
    lines = [f"| | {' | '.join(FRAMEWORKS.values())} |", "|---" * (len(FRAMEWORKS) + 1) + "|"]
    lines += [
        f"| {feature} | {' | '.join(str(cells[name]) for name in FRAMEWORKS)} |"
        for feature, cells in MATRIX.items()
    ]
    return "\n".join(lines)


def written(text: str) -> str:
    """Return the document with the table between its marks."""
    before, _, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert end, f"{_BEGIN} or {_END} is missing"
    return f"{before}{_BEGIN}\n{table()}\n{end}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
