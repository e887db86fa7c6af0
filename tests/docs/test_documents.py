"""Every command and snippet of the documents runs, or is in a list that says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import make_api
from lowdiff import errors
from lowdiff.core.events import Code
from tests.docs import run_document
from tests.docs.blocks import ROOT, blocks_of, documents
from tests.docs.listed import ELSEWHERE, NOT_RUN, RUNNABLE, begins, is_listed
from tests.processes import Script

#: Documents that are followed on several machines at once, here by as many processes.
NODES = {"examples/torchrun_multinode.md": 2}
#: Documents that begin at zero; the others take names as given.
FROM_ZERO = ("docs/getting_started.md", "examples/README.md")


#: Modules of lowdiff whose names users may import; docs/architecture.md says so.
PUBLIC = {
    *("compressors", "errors", "integrations", "metrics", "protocols", "recovery", "testing"),
    *("integrations.accelerate", "integrations.lightning", "integrations.tensorboard"),
    *("integrations.transformers", "recovery.prediction", "types"),
}


def runnable() -> list[str]:
    return [
        d
        for d in documents()
        if any(b.language in RUNNABLE and not is_listed(b) for b in blocks_of(d))
    ]


def test_every_block_is_run_or_listed_with_a_reason() -> None:
    blocks = [block for document in documents() for block in blocks_of(document)]
    assert len(blocks) > 25
    lost = [b for b in blocks if b.language not in RUNNABLE and not is_listed(b)]
    assert not lost, "tag it bash or python, or say why it cannot run"
    assert {d for d in ELSEWHERE if not blocks_of(d)} <= {"docs/benchmarks.md"}
    for known in NOT_RUN:
        assert any(begins(block, *known) for block in blocks), f"{known} is gone"
    assert {"docs/getting_started.md", "docs/operations.md"} <= set(runnable())


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", runnable())
def test_what_a_document_shows_runs(document: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    given = (
        [] if document in FROM_ZERO or document in NODES else [ROOT / "tests/docs/given_names.py"]
    )
    processes = [
        Script(
            run_document.main,
            *[document, *given],
            output=tmp_path / f"output-{node}.txt",
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for node in range(NODES.get(document, 1))
    ]
    codes = [process.wait(800) for process in processes]
    assert codes == [0] * len(processes), "\n".join(p.printed()[-3000:] for p in processes)


def test_the_readme_is_a_first_screen() -> None:
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 140
    assert len(text.partition("```")[0].split()) <= 120
    assert len(text.partition("```python")[0].split()) <= 120


def test_the_api_page_is_what_the_docstrings_say() -> None:
    assert make_api.PAGE.read_text() == make_api.page(), "run python docs/make_api.py"


def test_every_error_and_every_event_is_explained() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    classes = [name for name, thing in vars(errors).items() if isinstance(thing, type)]
    for name in classes:
        if issubclass(getattr(errors, name), errors.LowDiffError):
            assert f"| `{name}` |" in text, name
    folders = ("lowdiff", "persistence", "recovery")
    code = "".join(p.read_text() for f in folders for p in (ROOT / f).rglob("*.py"))
    logged = r'(?:\bevent=|\bself\._say\(\s*)"([a-z_]+)"'
    events = set(re.findall(logged, code)) - {code.event for code in Code}
    assert "writer_recovered" in events
    for event in events:
        assert f"`{event}`" in text, event


def test_every_code_of_a_warning_has_its_heading_and_is_known() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    headings = re.findall(r"^### (LD\w+ \w+)$", text, re.MULTILINE)
    assert headings == [f"{code.value} {code.event}" for code in Code]
    folders = ("lowdiff", "compressors", "persistence", "recovery", "tuner")
    product = "".join(p.read_text() for f in folders for p in (ROOT / f).rglob("*.py"))
    assert set(re.findall(r"\bCode\.([A-Z_]+)", product)) == set(Code.__members__)
    assert not re.search(r"\blogg\w+\.(warning|error|exception)\(", product), "use Code.X.warn"


def test_documents_and_examples_import_public_modules_only() -> None:
    shown = [(b.document, b.text) for d in documents() for b in blocks_of(d)]
    shown += [(path.name, path.read_text()) for path in (ROOT / "examples").glob("*.py")]
    pattern = re.compile(r"^\s*(?:from|import) lowdiff\.([\w.]+)", re.MULTILINE)
    private = {
        f"{where} imports lowdiff.{name}"
        for where, text in shown
        for name in pattern.findall(text)
        if name not in PUBLIC
    }
    assert not private


def test_every_finding_is_listed() -> None:
    text = (ROOT / "docs/contributing.md").read_text()
    listed = re.findall(r"\]\(\.\./(findings/\S+?\.sh)\)", text)
    assert listed == sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("findings/*.sh"))


def test_links_between_documents_lead_somewhere() -> None:
    for document in documents():
        text = re.sub(
            r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE
        )
        for target in re.findall(r"(?:\]\(|src=\")(?!https?:)([^)\"]+)[)\"]", text):
            path, _, anchor = target.partition("#")
            found = (ROOT / document).parent / path if path else ROOT / document
            assert found.exists(), f"{document}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
                slugs = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
                assert anchor in slugs, f"{document}: {target}"
