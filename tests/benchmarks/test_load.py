"""The load benchmark's way of measuring, on a tiny model."""

from benchmarks.load import first_token, warm
from tests.fuzz.models import write_folder


def test_a_new_process_gives_the_first_token(tmp_path):
    write_folder(tmp_path)
    assert warm(tmp_path) == sum(file.stat().st_size for file in tmp_path.iterdir())
    runs = [first_token("kvant", tmp_path) for _ in range(2)]
    assert 0 < min(took for took, _ in runs) < 30
    assert len({token for _, token in runs}) == 1
