"""Which blocks are not run here, and why."""

from __future__ import annotations

from tests.docs.blocks import Block

RUNNABLE = ("bash", "python")

#: Documents whose blocks others read or run.
ELSEWHERE = {
    "README.md": "tests/unit/test_readme.py runs it; `make test` runs these tests, and so the demo",
    "docs/api.md": "made from the docstrings, whose page is compared below",
    "docs/benchmarks.md": "tests/benches runs every bench with --smoke",
    "docs/your_loop.md": "tests/docs/test_your_loop.py runs each of its snippets three times",
    "docs/format.md": "tests/unit/persistence/format/test_format_doc.py reads it",
}
#: Document and how a block begins -> why it is not run here.
NOT_RUN = {
    ("docs/architecture.md", "backward ─►"): "a drawing",
    ("docs/architecture.md", "OPEN ─►"): "a drawing",
    (
        "docs/compressors.md",
        "mesh = init_device_mesh(",
    ): "examples/hsdp_topk.py, which a test runs, in short",
    ("docs/contributing.md", "make check"): "it runs the tests",
    ("docs/operations.md", "pip install '.[object-store]'"): "it would change this environment",
    ("docs/integrations.md", "pip install"): "it would change this environment",
    (
        "docs/integrations.md",
        "from lowdiff.integrations.transformers",
    ): "tests/integrations/transformers/test_callback.py runs it",
    (
        "docs/integrations.md",
        "from lowdiff.integrations.lightning",
    ): "tests/integrations/lightning/test_callback.py runs it",
    (
        "docs/integrations.md",
        "import lowdiff.metrics\nfrom lowdiff.integrations.tensorboard",
    ): "tests/integrations/tensorboard/test_watching.py runs it",
    (
        "docs/integrations.md",
        "from lowdiff.integrations.accelerate",
    ): "tests/integrations/accelerate/test_run.py runs it",
    ("docs/publish.md", "publisher = "): "examples/rl_policy.py, which a test runs, in short",
    ("docs/publish.md", "for version in"): "examples/rl_policy.py, which a test runs, in short",
    (
        "docs/publish.md",
        "lowdiff convert",
    ): "tests/unit/persistence/versions/test_layouts.py converts",
    (
        "docs/sharded.md",
        "for block in model.blocks:",
    ): "examples/fsdp2_gpt.py, which a test runs, in short",
    ("docs/sharded.md", "state = {"): "tests/crash/sharded/loading.py does this",
    (
        "docs/sharded.md",
        "model_state, optimizer_state",
    ): "tests/crash/sharded/beginning.py does this",
    ("docs/survivors.md", "pip install '.[in-process]'"): "it would change this environment",
    (
        "docs/survivors.md",
        "from lowdiff.integrations",
    ): "restart_in_place.py, which a test runs, in short",
    (
        "docs/survivors.md",
        "python -m lowdiff.integrations",
    ): "tests/crash/launch/test_begun_anew.py runs it",
    ("docs/survivors.md", "torchrun"): "tests/crash/launch/test_begun_anew.py runs it",
    ("docs/recovery.md", "Step 799 of runs/spike"): "what the command above prints",
    (
        "examples/README.md",
        "kill -9 $(pgrep",
    ): "tests/crash/launch/test_sigkill.py kills this example",
}


def is_listed(block: Block) -> bool:
    """Whether a reason is given for leaving it out."""
    return block.document in ELSEWHERE or any(begins(block, *known) for known in NOT_RUN)


def begins(block: Block, document: str, start: str) -> bool:
    """Whether it is the block that the list knows by its start."""
    return block.document == document and block.text.startswith(start)
