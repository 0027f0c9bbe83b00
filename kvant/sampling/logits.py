"""What is done to logits before a token is drawn: small pure functions over rows [R, V], in fp32.

A filter is a threshold: the smallest logit that stays. Tokens that tie with it stay too, so that the outcome does not
depend on how a sort orders equals, and tokens are always drawn in order of their id. At least the best token stays.
"""

import torch
from torch import Tensor


def forbid(logits: Tensor, row: int, ids: Tensor) -> None:
    """In place: the tokens `ids` of one row can no longer be drawn."""
    logits[row, ids] = float("-inf")


def penalise(logits: Tensor, counts: Tensor, seen: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor) -> Tensor:
    """OpenAI's presence and frequency penalties and CTRL's repetition penalty (Keskar et al., 2019).

    `counts` [R, V]: occurrences among generated tokens; `seen` [R, V] bool: occurs in prompt or generated tokens;
    the penalties [R, 1].
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - frequency * counts - presence * (counts > 0)


def top_k_threshold(logits: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest logit of each row: `top_k` [R] with 0 for "all" -> [R, 1]."""
    largest = int(top_k.max())
    values = logits.topk(min(largest, logits.shape[-1]), dim=-1).values
    kth = values.gather(1, (top_k.clamp(1, values.shape[1]) - 1)[:, None])
    return torch.where(top_k[:, None] > 0, kth, float("-inf"))


def top_p_threshold(logits: Tensor, top_p: Tensor) -> Tensor:
    """The last logit of the smallest set whose probability reaches `top_p` [R] -> [R, 1]. Filtered logits are -inf."""
    ordered = logits.sort(dim=-1, descending=True).values
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities  # mass of the tokens ahead of each
    kept = (before < top_p[:, None]).sum(-1, keepdim=True).clamp(min=1)
    threshold = ordered.gather(1, kept - 1)
    return torch.where(top_p[:, None] < 1, threshold, float("-inf"))


def min_p_threshold(logits: Tensor, min_p: Tensor) -> Tensor:
    """The logit of a token `min_p` [R] times as likely as the best one (Nguyen et al., 2024) -> [R, 1]."""
    return logits.max(-1, keepdim=True).values + min_p[:, None].log()


def keep(logits: Tensor, threshold: Tensor) -> Tensor:
    """Logits below `threshold` [R, 1] become -inf."""
    return logits.masked_fill(logits < threshold, float("-inf"))
