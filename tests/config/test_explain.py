"""Where a value came from: the last layer that names it, unless it was left open and decided."""

from kvant.config.engine import EngineConfig
from kvant.config.explain import Explained, Layer, explain, merged, others
from kvant.config.option import options_of

OPTIONS = options_of(EngineConfig)
LAYERS = [Layer("file", {"threads": 3, "max_num_seqs": 4}), Layer("command line", {"threads": 5, "device": "auto"})]


def test_layers():
    assert merged(LAYERS) == {"threads": 5, "max_num_seqs": 4, "device": "auto"}
    rows = {row.name: row for row in explain(OPTIONS, LAYERS)}
    assert [*rows] == [option.name for option in OPTIONS]
    assert rows["threads"] == Explained("threads", 5, "command line")
    assert rows["max_num_seqs"] == Explained("max_num_seqs", 4, "file")
    assert rows["block_size"] == Explained("block_size", 16, "default")
    assert rows["max_model_len"] == Explained("max_model_len", None, "default")


def test_decisions_carry_their_reason():
    decided = EngineConfig(device="cpu", threads=5, max_num_seqs=4, max_model_len=100)
    reasons = ["device: cpu, because there is no GPU", "max_model_len: 100, the model's own", "executor: torch, because"]
    rows = {row.name: row for row in explain(OPTIONS, LAYERS, decided, reasons)}
    assert rows["device"] == Explained("device", "cpu", "decided", "because there is no GPU")
    assert rows["max_model_len"] == Explained("max_model_len", 100, "decided", "the model's own")
    assert rows["threads"].origin == "command line"
    assert others(OPTIONS, reasons) == ["executor: torch, because"]
