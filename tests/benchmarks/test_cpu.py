"""The arithmetic of the CPU benchmark: medians and ratios, what an engine's run says, the peers' output, the peer's repair."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks import cpu, ours
from benchmarks.peers import build_llama_cpp
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.machine import Machine
from benchmarks.peers.scenario import Load, Pace, launch
from benchmarks.results import read


def test_summary_takes_the_better_setting_of_the_peer_and_the_ratio_of_every_round():
    rounds = [
        {"kvant": 200.0, "llama.cpp off": 100.0, "llama.cpp on": 50.0, "transformers": 20.0},
        {"kvant": 90.0, "llama.cpp off": 60.0, "llama.cpp on": 70.0, "transformers": 30.0},
        {"kvant": 300.0, "llama.cpp off": 100.0, "llama.cpp on": 40.0, "transformers": 10.0},
    ]
    row = cpu.summary("one_short", "m", [r | {"others": n / 10} for n, r in enumerate(rounds)])
    assert row["others_cores"] == {"median": 0.1, "most": 0.2}
    assert (row["value"], row["unit"], row["peer"], row["peer_value"], row["ratio"]) == (200, "tok/s", "llama.cpp", 100, 2)
    assert row["spread"] == {"value": [90, 300], "peer_value": [60, 100], "ratio": [1.5, 3]}
    assert (row["rounds"], row["flash_attention"]) == (3, "off")
    assert (row["transformers"]["peer_value"], row["transformers"]["ratio"]) == (20, 10)
    assert "2.00 (1.50-3.00)" in cpu.table([row])
    assert cpu.table([row]).endswith("flash attention off   transformers 20, ratio 10.00")


def test_ratio_of_times_and_bytes_is_above_one_where_kvant_needs_less():
    row = cpu.summary("start", "m", [{"kvant": 0.25, "llama.cpp": 0.5, "others": 0}])
    assert row["ratio"] == 2
    assert row["unit"] == "s" and "flash_attention" not in row


def test_a_row_without_a_peer_says_so():
    row = cpu.summary("fresh_clone", "m", [{"kvant": 40.0}, {"kvant": 50.0}])
    assert (row["value"], row["unit"], row["peer"], row["peer_value"], row["ratio"]) == (45, "s", None, None, None)
    assert row["spread"] == {"value": [40, 50]}
    assert cpu.table([row]).endswith("fresh_clone [s]                             45")


def test_committed_rows_have_what_a_row_has():
    fields = {"scenario", "value", "unit", "peer", "peer_value", "ratio", "spread", "versions", "commit", "date"}
    rows = read(cpu.ROOT / "benchmarks" / "cpu.json")
    assert [row["scenario"] for row in rows] == [name for name in cpu.NAMES if name in {row["scenario"] for row in rows}]
    assert len(rows) >= 11 and all(fields <= row.keys() for row in rows)


def test_neighbours_change_places_every_round():
    assert cpu.alternate(["a", "b", "c"], 0) == ["a", "b", "c"]
    assert cpu.alternate(["a", "b", "c"], 1) == ["c", "b", "a"]


def test_every_row_names_a_part_that_its_load_measures():
    for row in cpu.ROWS:
        assert row.part in Pace._fields
        assert (row.part == "prompt") == (row.load.new == 1)


def test_a_fresh_clone_runs_with_nothing_cached(monkeypatch):
    seen = {}

    def watched(command, environment):
        seen.update(environment, clone=Path(command[command.index("-C") + 1]))
        assert (seen["clone"] / "Makefile").is_file() and not (seen["clone"] / ".venv").exists()
        assert command[-2:] == ["run", "PROMPT=hello"]
        return "answer"

    monkeypatch.setattr(ours, "launch", watched)
    assert ours.fresh_clone("hello") == "answer"
    assert Path(seen["KVANT_CACHE"]).parent == seen["clone"].parent and seen["PIP_NO_CACHE_DIR"] == "1"
    assert not seen["clone"].exists()


def test_pace_counts_decode_only_while_all_streams_run(monkeypatch):
    bench = object.__new__(ours.Kvant)
    clock = iter([100.0])
    # The second stream begins a step later: tokens before 102 and after 104 belong to a smaller batch.
    times = [[101.0, 102.0, 103.0, 104.0], [102.0, 103.0, 104.0, 105.0]]
    monkeypatch.setattr(bench, "_run", lambda load: times, raising=False)
    monkeypatch.setattr(ours.time, "perf_counter", lambda: next(clock))
    pace = bench.pace(Load(streams=2, prompt=10, new=4))
    assert pace == Pace(prompt=10.0, decode=2.0, whole=8 / 5)


@pytest.fixture
def echo(tmp_path: Path):
    """Builds a program that records its arguments and prints `text`."""

    def make(name: str, text: str) -> Path:
        program = tmp_path / name
        log = tmp_path / "arguments"
        program.write_text(
            f"#!{sys.executable}\nimport sys\nopen({str(log)!r}, 'w').write(' '.join(sys.argv[1:]))\nprint({text!r})\n"
        )
        program.chmod(0o755)
        return program

    return make


def test_a_decode_at_depth_asks_llama_bench_for_no_prompt(echo, tmp_path):
    peer = LlamaCpp({"llama-bench": echo("bench", 'note\n{"avg_ts": 98.5}')}, Path("m.gguf"), 2)
    assert peer.pace(Load(1, 512, 64), "off") == Pace(None, 98.5, None)
    assert "-m m.gguf -t 2 -p 0 -n 64 -d 512" in (tmp_path / "arguments").read_text()
    assert peer.pace(Load(1, 512, 1), "on") == Pace(98.5, None, None)
    assert "-p 512 -n 0" in (tmp_path / "arguments").read_text()


def test_streams_ask_llama_batched_bench_for_room_for_all(echo, tmp_path):
    line = '{"speed_pp": 900.0, "speed_tg": 250.0, "t": 4.0}'
    peer = LlamaCpp({"llama-batched-bench": echo("batched", line)}, Path("m.gguf"), 2)
    assert peer.pace(Load(8, 128, 64), "on") == Pace(900.0, 250.0, 128.0)
    assert "-npp 128 -ntg 64 -npl 8 -c 1536 -fa on" in (tmp_path / "arguments").read_text()


def test_a_peer_that_says_nothing_is_an_error(echo):
    peer = LlamaCpp({"llama-bench": echo("bench", "")}, Path("m.gguf"), 2)
    with pytest.raises(RuntimeError, match="exit code 0"):
        peer.pace(Load(1, 512, 1), "on")


def test_launch_times_the_first_byte_and_sees_the_memory_of_the_program_alone():
    source = "import time; print('a', flush=True); time.sleep(0.6); print('b'); x = bytearray(60 << 20)"
    here = bytearray(200 << 20)  # the memory of whoever asks is not the program's
    start = time.perf_counter()
    run = launch([sys.executable, "-c", source])
    assert run.text == "a\nb"
    assert 0.5 < run.seconds - run.first_byte < time.perf_counter() - start
    assert 60 << 20 < run.peak_bytes < len(here)
    with pytest.raises(RuntimeError, match="it failed or said nothing"):
        launch([sys.executable, "-c", "print('a'); raise SystemExit(3)"])


def test_others_are_whoever_is_neither_this_process_nor_its_children(monkeypatch):
    readings = iter([(0.0, 100.0, 10.0), (10.0, 125.0, 30.0), (20.0, 145.0, 50.0)])
    monkeypatch.setattr(Machine, "_read", staticmethod(lambda: next(readings)))
    machine = Machine()
    assert [machine.lap(), machine.lap()] == [0.5, 0.0]


def settled(monkeypatch, loads: list[float], patience: float) -> int:
    """How often the machine was looked at; the last of `loads` stays."""
    machine, seen = Machine(), []

    def lap() -> float:
        seen.append(loads[min(len(seen), len(loads) - 1)])
        return seen[-1]

    monkeypatch.setattr("benchmarks.peers.machine.GLANCE", 0.01)
    monkeypatch.setattr(machine, "lap", lap)
    machine.settle(time.monotonic() + patience)
    return len(seen)


def test_settling_waits_for_quiet_neighbours_but_not_for_ever(monkeypatch):
    assert settled(monkeypatch, [2.0], patience=0) == 0
    assert settled(monkeypatch, [2.0, 1.5, 0.3, 0.05], patience=60) == 4
    assert 1 <= settled(monkeypatch, [2.0], patience=0.1) <= 10


def test_a_disturbed_measurement_is_made_again_while_patience_lasts(monkeypatch):
    laps = iter([1.5, 0.02, 0.04, 0.0, 1.5])
    machine = Machine()
    monkeypatch.setattr(machine, "settle", lambda end: None)
    monkeypatch.setattr(machine, "lap", lambda: next(laps))
    runs: list[str] = []
    engines = {name: lambda name=name: runs.append(name) or len(runs) for name in ("a", "b")}
    bench = cpu.Bench(None, None, None, machine, patience=60, equality={})
    assert bench._in_turn(engines, 1) == ({"b": 2, "a": 3}, 0.04)
    assert runs == ["b", "b", "a"]
    assert bench._replace(patience=0)._in_turn(engines, 0)[1] == 1.5


def test_the_barrier_is_put_in_once_and_a_tree_that_differs_is_refused(tmp_path):
    file = tmp_path / build_llama_cpp.AMX_FILE
    file.parent.mkdir(parents=True)
    file.write_text("    tc.rows = 8;\n" + build_llama_cpp.LOAD)
    for _ in range(2):
        build_llama_cpp.mend(tmp_path)
        assert file.read_text() == "    tc.rows = 8;\n" + build_llama_cpp.BARRIER + build_llama_cpp.LOAD
    file.write_text("nothing to load")
    with pytest.raises(build_llama_cpp.BuildError, match="does not load its tile configuration"):
        build_llama_cpp.mend(tmp_path)
