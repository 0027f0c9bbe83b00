"""`kvant plan`: where the memory goes, and what fits into the rest. From the config alone: no weights, no GPU needed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvant.cli.doors import Doors
from kvant.cli.models import fetched, model_argument
from kvant.cli.options import ENGINE_OPTIONS, chosen, config_file, generated, layers
from kvant.cli.screen import columns
from kvant.config.engine import DEFAULT_MODEL, EngineConfig
from kvant.config.explain import merged
from kvant.config.hardware import Gpu, Hardware
from kvant.config.kv_memory import show_bytes
from kvant.config.resolve import Resolved
from kvant.errors import ConfigError

LENGTHS = (512, 2048, 8192, 32768, 131072)  # of sequences, for the table of what fits
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


@click.command()
@model_argument(f"As for kvant run [default: {DEFAULT_MODEL}]", required=False)
@click.option("--gpu-memory", metavar="SIZE", help="Plan for a GPU with this memory (141GB, 80GiB), whatever is here")
@click.option("--save-result", metavar="FILE", type=click.Path(path_type=Path), help="The plan as JSON too")
@config_file
@generated(engine=ENGINE_OPTIONS)
@click.pass_obj
def plan(
    doors: Doors,
    *,
    model: str | None,
    gpu_memory: str | None,
    save_result: Path | None,
    config: Path | None,
    engine: dict[str, Any],
) -> None:
    """Show what takes memory, and how many tokens and sequences fit.

    Takes the options of `kvant run` and decides as its start does. The plan for a GPU of another machine assumes that
    nothing else runs on it, and compute capability 9.0.
    """
    from kvant.engine.create import plan as decide

    values = merged(layers(config, model, engine, {}))
    options = EngineConfig(model=values.get("model", DEFAULT_MODEL), **chosen(values, ENGINE_OPTIONS))
    hardware = doors.detect()
    if gpu_memory is not None:
        if options.device == "cpu":
            raise ConfigError("--gpu-memory plans for a GPU and --device cpu for none; give one of them")
        hardware = with_gpu(hardware, parse_bytes(gpu_memory))
    fetched(doors, options.model)
    opened, resolved = decide(options, hardware)
    show(doors, options.model, resolved, hardware)
    for notice in (*resolved.notices, *opened.notices):
        doors.screen.notice(notice)
    if save_result is not None:
        save_result.write_text(json.dumps(as_json(options.model, resolved), indent=1) + "\n")


def with_gpu(hardware: Hardware, num_bytes: int) -> Hardware:
    """`hardware` with one GPU of `num_bytes`, all of them free."""
    gpu = Gpu(name=f"GPU of {show_bytes(num_bytes)}", memory_total=num_bytes, memory_free=num_bytes, compute_capability=(9, 0))
    return replace(hardware, gpus=(gpu,), torch_cuda=hardware.torch_cuda or "assumed")


def parse_bytes(text: str) -> int:
    """141GB, 80GiB, 1.5T, 1000000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"--gpu-memory must be a size such as 141GB or 80GiB, not {text[:40]!r}")
    return int(float(match[1]) * UNITS[match[2]])


def show(doors: Doors, model: str, resolved: Resolved, hardware: Hardware) -> None:
    """The parts, their sum, and what fits."""
    config, screen = resolved.config, doors.screen
    gpu = hardware.gpus[0] if config.device == "cuda" else None
    total = gpu.memory_total if gpu else hardware.memory_total
    screen.rule(f"{model}: {resolved.executor} on {gpu.name if gpu else 'the CPU'}, {config.dtype}")
    rows = [[part.name, show_bytes(part.num_bytes), part.what] for part in resolved.memory]
    held = sum(part.num_bytes for part in resolved.memory)
    rows.append(["together", show_bytes(held), f"of {show_bytes(total)}"])
    for line in columns(rows):
        screen.line("  " + line)
    screen.rule("Sequences that fit at once, by their length")
    lengths = sorted({length for length in LENGTHS if length < fits(resolved)} | {fits(resolved)})
    rows = [[f"{_count(length)} tokens", f"{_count(sequences(resolved, length))} sequences"] for length in lengths]
    for line in columns(rows):
        screen.line("  " + line)


def fits(resolved: Resolved) -> int:
    """The longest context."""
    assert resolved.config.max_model_len is not None
    return resolved.config.max_model_len


def sequences(resolved: Resolved, length: int) -> int:
    """How many sequences of `length` run at the same time."""
    return min(resolved.config.max_num_seqs, resolved.kv.num_sequences(length))


def as_json(model: str, resolved: Resolved) -> dict[str, Any]:
    """The same for programs. Bytes and tokens are exact."""
    config = resolved.config
    return {
        "model": model,
        "device": config.device,
        "executor": resolved.executor,
        "dtype": config.dtype,
        "parts": [part._asdict() for part in resolved.memory],
        "num_bytes": sum(part.num_bytes for part in resolved.memory),
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "num_blocks": list(resolved.num_blocks),
        "sequences": {
            str(length): sequences(resolved, length) for length in (*LENGTHS, fits(resolved)) if length <= fits(resolved)
        },
    }


def _count(number: int) -> str:
    return f"{number:,}"
