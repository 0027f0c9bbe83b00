"""What can never run here, and why: one line with the numbers and the remedy, known before anybody waits for it."""

from kvant.kvcache.manager import KVCacheManager
from kvant.scheduler.budget import SchedulerLimits
from kvant.types import Request, Sequence


def refusal(request: Request, width: int, limits: SchedulerLimits, manager: KVCacheManager) -> str | None:
    """Why `request`, which takes `width` seats, can never run within these limits; None if it can."""
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        return "the prompt is empty: it must hold at least one token"
    if num_tokens >= limits.max_model_len:
        return (
            f"the prompt has {num_tokens} tokens, but the context holds {limits.max_model_len} and one of them must be left "
            "to generate: shorten the prompt or raise max_model_len"
        )
    if not manager.fits_alone(num_tokens):
        return (
            f"the prompt has {num_tokens} tokens, but the KV cache holds at most "
            f"{manager.max_tokens_one_sequence(limits.max_model_len)}: shorten the prompt or raise kv_cache_memory_bytes"
        )
    if width > limits.max_num_seqs:
        return (
            f"the request takes {width} sequences at the same time, but the engine runs {limits.max_num_seqs}: lower n or "
            "raise max_num_seqs"
        )
    return None


def outgrown(sequence: Sequence) -> str:
    """Why a sequence that did run cannot go on, not even alone."""
    return (
        f"the sequence reached {len(sequence.tokens)} tokens and the KV cache holds no more of one sequence: lower max_tokens "
        "or raise kv_cache_memory_bytes"
    )
