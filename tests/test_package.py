"""The wheel: small, whole, and enough by itself."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvant

ROOT = Path(kvant.__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target), str(ROOT)]
    subprocess.run(command, check=True)
    (path,) = target.glob("kvant-*.whl")
    return path


def test_the_wheel_is_small_and_holds_what_the_native_step_is_built_from(wheel):
    assert wheel.stat().st_size < 5_000_000
    names = set(zipfile.ZipFile(wheel).namelist())
    for source in ROOT.glob("kvant/native/*"):
        if source.suffix in (".cpp", ".h", ".py"):
            assert f"kvant/native/{source.name}" in names, source.name
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)
    assert any(name.endswith("LICENSE") for name in names)


def test_an_installed_wheel_answers(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *constraints, str(wheel)], check=True)
    command = [python.with_name("kvant"), "run", "-p", "What is the capital of France?"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
