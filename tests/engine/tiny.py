"""Engines around tiny random networks, without files or tokenizers: what the tests of the loop share."""

from dataclasses import dataclass, replace

import torch
import transformers

from kvant.attention.select import choose
from kvant.attention.storage import KVStorage
from kvant.config.model import ModelConfig
from kvant.config.sampling import SamplingParams
from kvant.decoding.stopping import DecodeContext
from kvant.decoding.strategy import want, width
from kvant.engine.engine import Engine
from kvant.kvcache.manager import KVCacheManager
from kvant.runner.runner import TorchRunner
from kvant.runner.seats import SeatTable
from kvant.scheduler.budget import SchedulerLimits
from kvant.scheduler.scheduler import Scheduler
from kvant.tokenizer.stops import StopMatcher
from kvant.types import Output, StepInput
from tests.network import from_transformers

VOCABULARY = 160


def tiny(family: str, seed: int = 3, device: str = "cpu"):
    """A random network of `family`, weights large enough that its greedy texts wander."""
    shape = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, max_position_embeddings=512)
    if family == "llama":
        config = transformers.LlamaConfig(**shape, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    else:
        config = transformers.Gemma3TextConfig(
            **shape, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=1, head_dim=8, sliding_window=21
        )
    torch.manual_seed(seed)
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name and family == "llama" else 0.0))
    return from_transformers(
        hf, ModelConfig.from_dict({**config.to_dict(), "architectures": [type(hf).__name__]}), device=device
    )


def bytes_of(token: int) -> bytes:
    """The tests' tokenizer: token 7 is the text "7,"."""
    return f"{token},".encode()


def engine_of(
    model,
    *,
    num_blocks=128,
    max_num_seqs=40,
    budget=256,
    max_model_len=256,
    caching=True,
    seed=0,
    end=(),
    device="cpu",
    attention="sdpa",
    block_size=16,
) -> Engine:
    """An engine over `model`; every structure with bookkeeping is checked after each step."""
    groups = tuple(replace(group, block_size=block_size) for group in model.config.cache_groups())
    blocks = tuple(num_blocks for _ in groups)
    manager = KVCacheManager(groups, blocks, enable_prefix_caching=caching)
    scheduler = Scheduler(
        manager,
        SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len),
        want,
        width,
    )
    storage = KVStorage(groups, blocks, torch.float32, device)
    attention = choose(attention, storage).backend
    runner = TorchRunner(model, storage, SeatTable(max_num_seqs, groups, max_model_len), attention, VOCABULARY)
    context = DecodeContext(max_model_len=max_model_len, new_matcher=lambda sampling: StopMatcher(sampling.stop, bytes_of))
    return CheckedEngine(scheduler, runner, context, frozenset(end), seed)


class CheckedEngine(Engine):
    def step(self, step_input: StepInput) -> list[Output]:
        outputs = super().step(step_input)
        self.scheduler.check()
        return outputs


@dataclass
class Answer:
    """Everything one choice of a request said."""

    tokens: list[int]
    logprobs: list
    prompt_logprobs: tuple | None = None
    finish: str | None = None
    stop_reason: object = None
    error: str | None = None
    num_cached: int = 0


def collect(answers: dict, output: Output) -> None:
    answer = answers.setdefault((output.request_id, output.index), Answer([], []))
    assert answer.finish is None, "news after the end"
    answer.tokens += output.token_ids
    answer.logprobs += output.logprobs
    answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
    answer.finish = output.finish_reason.value if output.finish_reason else None
    answer.stop_reason, answer.error, answer.num_cached = output.stop_reason, output.error, output.num_cached_tokens


def drive(engine: Engine, prompts: dict[str, list[int]], sampling, between=None, arrivals=None, survives=()) -> dict:
    """Runs requests to their end. `sampling` is one for all or one per id; `between(engine, step)` acts between steps.

    Steps may raise what `survives` names: the next one is tried all the same.
    """
    waiting = [(arrivals or {}).get(name, 0) for name in prompts]
    pending = sorted(zip(waiting, prompts, strict=True))
    answers: dict = {}
    step = 0
    while pending or engine.has_work():
        while pending and pending[0][0] <= step:
            name = pending.pop(0)[1]
            params = sampling[name] if isinstance(sampling, dict) else sampling
            engine.add(engine.request(prompts[name], params, request_id=name))
        try:
            outputs = engine.step(StepInput(messages=engine.inbox.receive()))
        except survives:
            engine.scheduler.check()
            outputs = []
        for output in outputs:
            collect(answers, output)
        if between is not None:
            between(engine, step)
        step += 1
        assert step < 20_000, "the engine makes no progress"
    return answers


def prompts_of(count: int, low: int = 3, high: int = 60, seed: int = 0, shared: int = 0) -> dict[str, list[int]]:
    """Random prompts of random lengths; the first `shared` tokens of all are the same."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randint(0, VOCABULARY, (shared,), generator=generator).tolist()
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return {
        f"r{number:02d}": head + torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        for number, length in enumerate(lengths)
    }


GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=3)
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=11, max_tokens=24, logprobs=3, repetition_penalty=1.1
)
