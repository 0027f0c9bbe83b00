"""Standard streams that are closed, full, or lost: one line where one can be read, an exit code, never a traceback."""

import os
import subprocess
import sys

import pytest

from tests.cli.terminal import ROOT
from tests.tiny_folder import write_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_folder(tmp_path_factory.mktemp("model")))


def shell(line: str, model: str = "") -> tuple[int, str, str]:
    """Runs `line`, in which KVANT is the program and MODEL a model, in a shell of its own."""
    program = f'{sys.executable} -c "from kvant.cli.main import main; main()"'
    line = line.replace("KVANT", program).replace("MODEL", model)
    done = subprocess.run(["bash", "-c", line], capture_output=True, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=60)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a system without /dev/full")
@pytest.mark.parametrize("command", ["KVANT run MODEL -p hi --max-tokens 4", "KVANT list", "KVANT --version", "KVANT doctor"])
def test_a_full_disk_is_one_line(model, command):
    code, _, err = shell(f"{command} > /dev/full", model)
    assert code == 2 and "Traceback" not in err and err.count("\n") <= 1
    assert err == "" or err.startswith("error: No space left on device")
    code, _, err = shell("KVANT run nope -p hi 2> /dev/full", model)
    assert code == 2


@pytest.mark.parametrize(
    "streams, code",
    [(">&-", 0), ("2>&-", 0), ("<&-", 0), ("<&- >&- 2>&-", 0)],
)
def test_streams_that_are_closed_are_streams_of_nothing(model, streams, code):
    for command in ("KVANT run MODEL -p hi --max-tokens 4", "KVANT list"):
        assert shell(f"{command} {streams}", model)[0::2] == (code, "")
    code, out, err = shell(f"KVANT run MODEL {streams}", model)  # an empty prompt
    assert code == 2 and out == "" and (err.startswith("error: ") or "2>&-" in streams)


def test_a_reader_that_goes_away_ends_the_program_quietly(model):
    code, _, err = shell("set -o pipefail; KVANT run MODEL -p hi --max-tokens 400 --ignore-eos | head -c 3 > /dev/null", model)
    assert (code, err) == (1, "")
