"""Ancestral decoding: each token is drawn from the distribution after the tokens before it. Greedy is its limit.

How a token is drawn (temperature, top-p, ...) is the sampler's; here is what becomes of it.

    n = 3     prompt ──▶ one row, three draws ──┬─▶ choice 0: the sequence itself
                                                ├─▶ choice 1: fork            forks come first in the Decision, so that
                                                └─▶ choice 2: fork            they share blocks nobody has written into

`Sequence.state` is the matcher of the request's stop strings, or None for requests without any.
"""

from collections.abc import Iterable

from kvant.decoding.stopping import DecodeContext, StopMatcher, ending
from kvant.types import Advance, Draw, FinishReason, Request, Scheduled, Selected, Sequence, Want

NOT_FINITE = (
    "the model's output held NaN or infinity, so this request was ended; if it happens again, use dtype float32 or check the "
    "model file"
)


class Ancestral:
    """Greedy decoding and sampling, with `n` independent choices. Keeps nothing itself."""

    def width(self, request: Request) -> int:
        """One seat per choice."""
        return request.sampling.n

    def want(self, sequence: Sequence) -> Want:
        """One token; after the prompt, the first token of every choice."""
        return Draw(_num_draws(sequence), sequence.index)

    def advance(self, rows: Iterable[tuple[Scheduled, Selected]], context: DecodeContext) -> list[Advance]:
        """The drawn tokens, appended; rows of unfinished prompts only hand on their prompt log-probabilities."""
        advances: list[Advance] = []
        for row, selected in rows:
            sequence = row.sequence
            if not selected.finite:
                advances += _failures(sequence)
            elif row.want is None:
                if selected.prompt_logprobs:
                    advances.append(Advance(sequence=sequence, prompt_logprobs=selected.prompt_logprobs))
            else:
                advances += [_grow(_fork(sequence, i), selected, i, context, sequence) for i in range(1, row.want.count)]
                advances.append(_grow(sequence, selected, 0, context))
        return advances


def _num_draws(sequence: Sequence) -> int:
    """How many choices are due from this sequence's next row."""
    num_choices = sequence.request.sampling.n
    return num_choices if num_choices > 1 and sequence.index == 0 and sequence.num_output_tokens == 0 else 1


def _fork(parent: Sequence, index: int) -> Sequence:
    return Sequence(request=parent.request, index=index, tokens=list(parent.tokens))


def _grow(
    sequence: Sequence, selected: Selected, draw: int, context: DecodeContext, fork_of: Sequence | None = None
) -> Advance:
    """Appends draw number `draw` of a row to `sequence`."""
    request, token = sequence.request, selected.token_ids[draw]
    finish, stop_reason = ending(request, token, len(sequence.tokens) + 1, _matcher(sequence, context), context.max_model_len)
    return Advance(
        sequence=sequence,
        tokens=(token,),
        logprobs=(selected.logprobs[draw],) if selected.logprobs else (),
        logprob_delta=selected.chosen_logprobs[draw] if selected.chosen_logprobs else 0.0,
        fork_of=fork_of,
        finish=finish,
        stop_reason=stop_reason,
        prompt_logprobs=selected.prompt_logprobs if fork_of is None else (),
    )


def _matcher(sequence: Sequence, context: DecodeContext) -> StopMatcher | None:
    """The sequence's own matcher, made for its first token. Choices differ from the first token on, so none is shared."""
    if sequence.state is None and sequence.request.sampling.stop:
        sequence.state = context.new_matcher(sequence.request.sampling)
    matcher: StopMatcher | None = sequence.state
    return matcher


def _failures(sequence: Sequence) -> list[Advance]:
    """Ends a sequence, and the choices that were to fork from it, without touching anybody else's."""
    forks = [
        Advance(sequence=_fork(sequence, index), fork_of=sequence, finish=FinishReason.ERROR, error=NOT_FINITE)
        for index in range(1, _num_draws(sequence))
    ]
    return [*forks, Advance(sequence=sequence, finish=FinishReason.ERROR, error=NOT_FINITE)]
