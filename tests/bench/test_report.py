"""Results: fractions of the right sense, spreads, and a file that says where it comes from."""

import json

import pytest

from kvant.bench.report import rate, save, table, timed


def test_times_and_rates_say_the_same():
    time, speed = timed("a", [0.004, 0.003], 0.0015, "ms"), rate("a", 6, [0.004, 0.003], 0.0015, "tok/s")
    assert time[1:5] == (pytest.approx(3), "ms", pytest.approx(1.5), pytest.approx(0.5))
    assert speed[1:5] == (pytest.approx(2000), "tok/s", pytest.approx(4000), pytest.approx(0.5))
    assert time.spread == speed.spread == pytest.approx(1 / 3)


def test_one_repetition_has_no_spread_and_some_lines_no_floor():
    row = timed("a", [2.0], None)
    assert (row.floor, row.fraction, row.spread) == (None, None, None)
    assert table([row])[1] == ["a", "2", "s", "", "", "", ""]


def test_a_saved_row_says_where_it_comes_from(tmp_path):
    save(tmp_path / "r.json", [timed("a", [2.0], 1.0)], command="latency")
    saved = json.loads((tmp_path / "r.json").read_text())
    (row,) = saved["rows"]
    assert saved["command"] == "latency"
    assert row["scenario"] == "a" and row["fraction"] == 0.5
    assert row["card"] and row["versions"]["kvant"] and len(row["date"]) == 10
