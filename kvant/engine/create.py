"""From an EngineConfig to a running engine: the one place where all parts are made and joined.

    open ─▶ tokenizer ─▶ resolve every "auto" ─▶ weights, cache tensors, runner ─▶ scheduler ─▶ Engine

The order matters: memory is planned before anything large is allocated, and everything a user can have got wrong about the
model or the options is noticed before the weights are read.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvant.config.engine import EngineConfig
from kvant.config.hardware import Hardware, detect
from kvant.config.resolve import Resolved, choose_device, choose_dtype, choose_executor, resolve
from kvant.config.sampling import SamplingParams
from kvant.decoding.stopping import DecodeContext
from kvant.decoding.strategy import want, width
from kvant.engine.engine import Engine
from kvant.engine.trace import Trace, TracedRunner, TracedScheduler
from kvant.kvcache.manager import KVCacheManager
from kvant.runner.factory import Opened, create_runner, open_model
from kvant.runner.timeline import timeline
from kvant.scheduler.budget import SchedulerLimits
from kvant.scheduler.scheduler import Scheduler
from kvant.tokenizer.stops import StopMatcher
from kvant.tokenizer.tokenizer import Tokenizer


class Created(NamedTuple):
    """An engine and what its doors tell the user."""

    engine: Engine
    tokenizer: Tokenizer
    tokenizer_source: Any  # what it was made from, and can be made from again elsewhere
    config: EngineConfig  # with everything decided
    default_sampling: dict[str, Any]
    reasons: tuple[str, ...]
    notices: tuple[str, ...]


def create(config: EngineConfig) -> Created:
    """Raises `ModelError` and `ConfigError` with their children, each naming the thing and the remedy."""
    trace = Trace(config.trace) if config.trace is not None else None  # first: a file that cannot be written is soon known
    with _nothing_collected():
        opened, resolved = plan(config, detect())
        source = opened.checkpoint.tokenizer_source
        tokenizer = Tokenizer.from_source(source)
        # Random weights without a tokenizer draw from all of their vocabulary, as a model of that shape would.
        num_drawable = opened.config.vocab_size if source.kind == "none" else tokenizer.num_drawable
        made = create_runner(resolved, opened, num_drawable)
        engine = _engine(resolved, opened, tokenizer, made.runner, trace)
    notices = (*resolved.notices, *opened.notices, *made.notices)
    return Created(engine, tokenizer, source, resolved.config, opened.default_sampling, resolved.reasons, notices)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python looks for unreachable cycles after every so many new objects. Loading makes a hundred thousand, and all of them
    stay: looking took a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan(config: EngineConfig, hardware: Hardware) -> tuple[Opened, Resolved]:
    """What `create` would decide for `config` on `hardware`. Opens the checkpoint, but reads no weights."""
    opened = open_model(config.model)
    device = choose_device(config, hardware).value
    executor = choose_executor(config, hardware, device).value
    dtype = choose_dtype(config, hardware, device, opened.config.torch_dtype, executor).value
    return opened, resolve(config, opened.config, hardware, opened.weight_bytes(executor, dtype))


def _engine(resolved: Resolved, opened: Opened, tokenizer: Tokenizer, runner: Any, trace: Trace | None) -> Engine:
    config = resolved.config
    assert config.max_model_len is not None and config.max_num_batched_tokens is not None
    manager = KVCacheManager(resolved.groups, resolved.num_blocks, enable_prefix_caching=config.enable_prefix_caching)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
    )
    context = DecodeContext(
        max_model_len=config.max_model_len,
        new_matcher=lambda sampling: _matcher(sampling, tokenizer),
    )
    end_token_ids = frozenset(opened.end_token_ids) | frozenset(tokenizer.eos_ids)
    seed = config.seed if config.seed is not None else int.from_bytes(os.urandom(7), "little")
    scheduler: Any = Scheduler(manager, limits, want, width)
    if trace is not None:
        runner = TracedRunner(runner, trace, timeline(runner, config.device))
        scheduler = TracedScheduler(scheduler, trace, runner)
    return Engine(scheduler, runner, context, end_token_ids, seed)


def _matcher(sampling: SamplingParams, tokenizer: Tokenizer) -> StopMatcher:
    """Looks for stop strings in the text as it is shown: where special tokens are left out, they interrupt no string."""
    bytes_of = tokenizer.shown_bytes if sampling.skip_special_tokens else tokenizer.token_bytes
    return StopMatcher(sampling.stop, bytes_of)
