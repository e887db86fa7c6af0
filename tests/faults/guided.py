"""The process that atheris guides: ``python -m tests.faults.guided CORPUS [libFuzzer options]``.

Only what is fuzzed is instrumented; all that is loaded would take minutes.
"""

from __future__ import annotations

import importlib
import sys

atheris = importlib.import_module("atheris")
with atheris.instrument_imports(include=["lowdiff.persistence"]):
    from tests.faults.fuzz import read_all

if __name__ == "__main__":
    atheris.Setup(sys.argv, read_all)
    atheris.Fuzz()
