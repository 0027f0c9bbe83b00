"""The floors hold: every package has a contract, and what must not need torch does not import it."""

import configparser
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvant

ROOT = Path(kvant.__file__).parent.parent

TORCH_FREE = [
    "kvant",
    "kvant.types",
    "kvant.batch",
    "kvant.errors",
    "kvant.config",
    "kvant.tokenizer",
    "kvant.kvcache",
    "kvant.scheduler",
    "kvant.decoding",
    "kvant.checkpoint",
    "kvant.native",
    "kvant.layers",
    "kvant.models",
    "kvant.cli",
    "kvant.llm",
    "kvant.engine.admission",
    "kvant.engine.async_engine",
    "kvant.engine.process",
    "kvant.engine.inbox",
    "kvant.engine.outputs",
]


def test_every_package_has_a_contract():
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    modules = {module.name for module in pkgutil.iter_modules(kvant.__path__)}
    assert modules == {name.rsplit(":", 1)[1] for name in contracts.sections() if name.startswith("importlinter:contract:")}


@pytest.mark.parametrize("name", TORCH_FREE)
def test_imports_no_torch(name):
    """In a fresh process, with every module below `name`."""
    script = f"""
import importlib, pkgutil, sys
module = importlib.import_module({name!r})
for found in pkgutil.walk_packages(getattr(module, "__path__", []), {name!r} + "."):
    if {name!r} != "kvant":
        importlib.import_module(found.name)
heavy = sorted({{"torch", "triton", "transformers", "safetensors.torch"}} & set(sys.modules))
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_importing_kvant_is_cheap():
    """`import kvant` loads nothing but itself: not even numpy."""
    script = "import sys, kvant; print(sorted({'numpy', 'torch', 'tokenizers', 'jinja2', 'click', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
