"""Log-probabilities as the user sees them: log-softmax of the unmodified logits, whatever the sampling parameters are.

`rank` counts the tokens that are strictly more probable, plus one. Exactly as many alternatives are returned as were asked
for; the chosen token's own value comes in addition, always.
"""

from torch import Tensor

from kvant.types import TokenLogprobs


def gather(logits: Tensor, tokens: Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """`logits` [P, V] fp32, `tokens` [P] the ids whose values are wanted, `num_top` alternatives per row."""
    normaliser = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    most = max(num_top, default=0)
    if most:
        values, ids = logits.topk(min(most, logits.shape[-1]), dim=-1)
        tops = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), (values - normaliser).tolist(), strict=True)]
    else:
        tops = [[] for _ in num_top]
    columns = (tokens.tolist(), (chosen - normaliser)[:, 0].tolist(), ranks.tolist(), tops, num_top)
    return [TokenLogprobs(token, value, rank, tuple(top[:n])) for token, value, rank, top, n in zip(*columns, strict=True)]
