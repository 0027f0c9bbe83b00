"""The parity table of docs/models.md: every family as a tiny random model, against transformers in fp32.

    python -m benchmarks.parity            prints the table
    python -m benchmarks.parity --write    and puts it between its marks in docs/models.md

Numbers are the largest differences of logits over a text of 41 tokens, which passes every window; `spread` is the standard
deviation of the reference's logits. "-" where a GGUF file has no words for the model. The native column is a mean, since
there the weights are kept in bf16 and activations are rounded: its errors are a distribution, not a last digit.
"""

import argparse
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from kvant.checkpoint.checkpoint import FileTensors
from kvant.checkpoint.open import open_checkpoint
from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.models.load import build, load_weights, placement
from kvant.native.build import Library, load
from kvant.native.record import record
from tests.models import cases
from tests.models.converter import write_gguf
from tests.models.test_files import AS_PUBLISHED, NOT_IN_GGUF
from tests.network import Harness, from_transformers, stored

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- parity: written by benchmarks/parity.py -->", "<!-- parity: end -->"
HEAD = ("model", "spread", "prompt", "token by token", "chunks", "mixed batch", "safetensors", "GGUF", "native, mean")
IDS, OTHER = cases.tokens(41, 1), cases.tokens(20, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    library = load(print)
    lines = table([row(name, library) for name in cases.CASES])
    print("\n".join(lines))
    if arguments.write:
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after)


def row(name: str, library: Library | None) -> list[str]:
    """One line of the table."""
    hf = cases.theirs(cases.CASES[name]())
    ours = from_transformers(hf, cases.config_of(hf))
    expected = cases.reference(hf, IDS)
    found = [name, f"{expected.std():.2f}"]
    found += [_show(_in_chunks(ours, size), expected) for size in (41, 1, 7)]
    harness = Harness(ours)
    harness.logits([("a", IDS[:30], 0)])
    mixed = harness.logits([("a", IDS[30:], 30), ("b", OTHER, 0)])
    found.append(_show(mixed, torch.cat((expected[30:], cases.reference(hf, OTHER)))))
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        found.append(_show(_from_file(Path(folder)), expected))
        found.append(_gguf(name, Path(folder)))
    found.append(f"{(_native(hf, library) - expected).abs().mean():.4f}" if library else "-")
    return found


def table(rows: list[list[str]]) -> list[str]:
    """Markdown."""
    return [f"| {' | '.join(line)} |" for line in (list(HEAD), ["---"] * len(HEAD), *rows)]


def _show(got: torch.Tensor, expected: torch.Tensor) -> str:
    return f"{(got - expected).abs().max():.0e}"


def _in_chunks(ours: Any, size: int) -> torch.Tensor:
    harness = Harness(ours)
    return torch.cat([harness.logits([("a", IDS[p : p + size], p)]) for p in range(0, len(IDS), size)])


def _from_file(path: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    model = build(replace(ModelConfig.from_dict(checkpoint.config), context_length=cases.CONTEXT), Mesh())
    load_weights(model, checkpoint.tensors, placement("cpu", torch.float32))
    return _in_chunks(model, len(IDS))


def _gguf(name: str, folder: Path) -> str:
    if name in NOT_IN_GGUF:
        return "-"
    hf = cases.theirs(AS_PUBLISHED.get(name, cases.CASES[name])())
    return _show(_from_file(write_gguf(folder / "model.gguf", hf)), cases.reference(hf, IDS))


def _native(hf: Any, library: Library) -> torch.Tensor:
    config = cases.config_of(hf)
    model = build(config, Mesh())
    state = {n: t for n, t in hf.state_dict().items() if not (config.tie_word_embeddings and n == "lm_head.weight")}
    load_weights(model, FileTensors({name: stored(name, tensor) for name, tensor in state.items()}), None)
    network = record(model, config.cache_groups()).finish(library, threads=2)
    harness = Harness(from_transformers(hf, config))
    return torch.from_numpy(network.run(harness.batch([("a", IDS, 0)]), network.new_cache([64] * len(harness.groups))).logits)


if __name__ == "__main__":
    main()
