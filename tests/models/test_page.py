"""docs/models.md names what there is: families, rope types, formats, and a line of the parity table for every case."""

from pathlib import Path

import pytest

from kvant.checkpoint.names import GGUF_FAMILIES
from kvant.config.formats import FORMATS
from kvant.config.rope import ROPE_TYPES
from kvant.models.registry import FAMILIES
from tests.models import cases

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
WORDS = [*FAMILIES, *(f"models/{file}.py" for file in FAMILIES.values()), *GGUF_FAMILIES, *ROPE_TYPES]


@pytest.mark.parametrize("word", WORDS)
def test_the_page_names_it(word):
    assert f"`{word}`" in PAGE


def test_every_case_has_its_line():
    table = PAGE.partition("<!-- parity: written")[2].partition("<!-- parity: end")[0].splitlines()
    assert [line.split("|")[1].strip() for line in table if line.startswith("| ")][2:] == list(cases.CASES)


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.block_elements > 1])
def test_the_page_names_every_block_format(name):
    assert name in PAGE


def test_gguf_families_are_registered():
    assert {family.architecture for family in GGUF_FAMILIES.values()} <= set(FAMILIES)
