"""The code in the documentation runs, block after block, in one namespace for each page."""

import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if "```python" in page.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documentation_code_runs(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        with warnings.catch_warnings():
            exec(compile(block, str(page), "exec"), namespace)
    assert len(blocks) >= 1
    if page.name == "README.md":
        printed = capsys.readouterr().out
        assert "64 CONVERGED" in printed
        assert "0.7391, 0.7391, 0.7391" in printed
        assert "64 of 64 samples did not converge" in printed


def test_documentation_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
