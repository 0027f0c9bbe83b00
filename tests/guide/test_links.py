"""Links of the documentation point to files that exist, and the guide names code that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE_NAME = re.compile(r"`(kvant/[\w/]+\.py): ([\w., ]+)`")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def defined_names(file: Path) -> set[str]:
    """Functions, classes, and methods as Class.method."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_point_to_files_that_exist(page: Path):
    local = [target for target in LINK.findall(prose(page)) if "://" not in target and not target.startswith(("#", "mailto:"))]
    broken = [target for target in local if not (page.parent / target.partition("#")[0]).exists()]
    assert not broken


def test_links_are_found_at_all():
    assert "docs/architecture.md" in LINK.findall(prose(ROOT / "README.md"))


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/guide/chapter*.md")), ids=name)
def test_the_guide_names_code_that_exists(page: Path):
    named = CODE_NAME.findall(page.read_text())
    assert named, "every chapter ends with how Kvant does it"
    for path, names in named:
        missing = set(names.split(", ")) - defined_names(ROOT / path)
        assert not missing, f"{path} does not define {missing}"


def code_of(page: Path) -> list[str]:
    """The code of a page, without comments in the shell's blocks; drawings aside."""
    blocks = [block for block in FENCE.findall(page.read_text()) if "│" not in block]
    return [re.sub(r"  +# .*", "", block) for block in blocks]


def test_the_chinese_readme_shows_the_same_code():
    english, chinese = code_of(ROOT / "README.md"), code_of(ROOT / "README.zh-CN.md")
    assert english == chinese, "README.md changed: change README.zh-CN.md as well"
