"""A page that was cut short holds what is whole in it, or nothing."""

from __future__ import annotations

from pathlib import Path

from lowdiff.persistence.files.mapped_file import Page, PageReader


def test_wherever_a_page_is_cut_its_newest_whole_content_is_read(tmp_path: Path) -> None:
    page = Page(tmp_path / "page")
    contents = [{"step": step} for step in range(2)]
    for content in contents:
        page.publish(content)
    whole = (tmp_path / "page").read_bytes()
    cut = tmp_path / "cut"
    found = []
    for length in [*range(64), *range(4090, 4160), len(whole)]:
        cut.write_bytes(whole[:length])
        found.append(PageReader(cut).read())
    assert all(content in ({}, *contents) for content in found)
    assert found[0] == {}
    assert found[63] == contents[1]
    assert found[-1] == contents[1]
