"""`kvant doctor`: what this machine has, what will be used, and why. Imports no torch and touches no network."""

import platform
from dataclasses import replace
from importlib import metadata

import click

import kvant
from kvant.cli.doors import Doors
from kvant.cli.models import model_rows
from kvant.cli.screen import columns
from kvant.config.compilers import remedy
from kvant.config.engine import DEFAULT_MODEL, EngineConfig
from kvant.config.hardware import Gpu, Hardware
from kvant.config.kv_memory import show_bytes
from kvant.config.resolve import choose_device, choose_dtype, choose_executor, choose_threads
from kvant.errors import KvantError

REQUIRED = ("numpy", "tokenizers", "huggingface_hub", "pyyaml", "jinja2", "click", "rich")
OPTIONAL = ("torch", "triton")

Rows = list[list[str]]


@click.command()
@click.pass_obj
def doctor(doors: Doors) -> None:
    """What this machine has, what will be used, and why."""
    hardware = doors.detect()
    sections = {
        "This machine": machine(hardware),
        "Software": software(),
        "What will be used": [[reason] for reason in decisions(doors, hardware)],
        f"Models in {doors.environment.models}": model_rows(doors),
    }
    for title, rows in sections.items():
        doors.screen.rule(title)
        for line in columns(rows):
            doors.screen.line("  " + line)
    if doors.environment.offline:
        doors.screen.line("KVANT_OFFLINE is set: nothing will be downloaded")


def machine(hardware: Hardware) -> Rows:
    """Name and fact, one per row."""
    cores, cpus = hardware.num_cores, hardware.num_cpus
    rows = [
        ["processor", f"{hardware.cpu_name or 'unknown'}; {cores} cores of {cpus} hardware threads may be used"],
        ["features", " ".join(sorted(hardware.cpu_flags)) or "none of those that make a difference"],
        ["memory", f"{show_bytes(hardware.memory_available)} available of {show_bytes(hardware.memory_total)}"],
        ["compiler", hardware.compiler or f"none; the fast path for CPUs needs one: {remedy()}"],
    ]
    gpus = [_gpu(gpu) for gpu in hardware.gpus] or ["no NVIDIA GPU found"]
    return rows + [["GPU", gpu] for gpu in gpus]


def software() -> Rows:
    """Name and version of everything that takes part."""
    rows = [
        ["kvant", kvant.__version__],
        ["python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"],
    ]
    for name in (*REQUIRED, *OPTIONAL):
        try:
            rows.append([name, metadata.version(name)])
        except metadata.PackageNotFoundError:
            rows.append([name, "not installed" if name in OPTIONAL else f"missing; pip install {name}"])
    return rows


def decisions(doors: Doors, hardware: Hardware) -> list[str]:
    """The reasons and notices of what a plain `kvant run` decides; the error where it would refuse."""
    from kvant.checkpoint.store import find_model
    from kvant.engine.create import plan

    config = EngineConfig()
    try:
        path = find_model(DEFAULT_MODEL, doors.environment)
        if path is not None:
            _, resolved = plan(replace(config, model=str(path)), hardware)
            return [*resolved.reasons, *resolved.notices]
        device = choose_device(config, hardware)
        executor = choose_executor(config, hardware, device.value)
        dtype = choose_dtype(config, hardware, device.value, "bfloat16", executor.value)
        choices = (device, executor, dtype, choose_threads(config, hardware))
    except KvantError as error:
        return [f"error: {error}"]
    return [text for choice in choices for text in (choice.reason, choice.notice) if text]


def _gpu(gpu: Gpu) -> str:
    major, minor = gpu.compute_capability
    return (
        f"{gpu.name}; {show_bytes(gpu.memory_free)} free of {show_bytes(gpu.memory_total)}; compute capability {major}.{minor}"
    )
