"""The same requests on an NVIDIA GPU and alone on the CPU: same tokens, same log-probabilities, in fp32."""

import pytest

from tests.engine.tiny import GREEDY, SAMPLED, drive, engine_of, prompts_of, tiny
from tests.equality.test_features import Expected, compare

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [7, 256])
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_a_gpu_says_what_a_cpu_says(family, sampling, budget, attention):
    alone = Expected(tiny(family))
    engine = engine_of(tiny(family, device="cuda"), num_blocks=300, budget=budget, device="cuda", attention=attention)
    prompts = prompts_of(12, 3, 60, seed=4, shared=20)
    for _ in ("cold", "warm"):
        compare(drive(engine, prompts, sampling), prompts, sampling, alone)
