"""``python -m benches.gpu``; see module `day`."""

from __future__ import annotations

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit(
        f"make gpu: {sys.executable} has no torch; name a Python that has: make gpu PYTHON=..."
    )

from benches import ending
from benches.gpu import day

ending.run(lambda: sys.exit(day.main(sys.argv[1:])))
