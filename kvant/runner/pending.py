"""What passes between a runner's verbs: the prepared input of a step, and the Selection that is still on the device.

The arrays are the runner's own, torch tensors or numpy; both give plain lists with `tolist`.
"""

from dataclasses import dataclass
from typing import Any

from kvant.batch import Batch
from kvant.runner.batch_builder import SelectPlan
from kvant.types import Selected, Selection, TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """One step's input: on the device, with the attention planned, and what `select` needs to know."""

    batch: Batch
    cache: Any
    plan: SelectPlan


@dataclass(slots=True, eq=False)
class Pending:
    """A Selection that is still on the device."""

    num_rows: int
    plan: SelectPlan
    ids: Any  # [Z]
    finite: Any  # [R]
    reports: list[TokenLogprobs]  # of `plan.logprobs`, in its order
    scores: dict[int, tuple[TokenLogprobs, ...]]  # schedule row -> its prompt positions

    def arrive(self) -> Selection:
        """Waits for the device and gives one entry per row of the schedule."""
        ids, finite = self.ids.tolist(), self.finite.tolist()
        report_of = {draw: report for (draw, _), report in zip(self.plan.logprobs, self.reports, strict=True)}
        draws_of: dict[int, list[int]] = {}
        for draw, logit_row in enumerate(self.plan.draw.rows.tolist()):
            draws_of.setdefault(self.plan.drawing[logit_row], []).append(draw)
        finite_of = dict(zip(self.plan.drawing, finite, strict=True))
        return Selection(rows=tuple(self._row(row, draws_of, finite_of, ids, report_of) for row in range(self.num_rows)))

    def _row(self, row: int, draws_of: dict, finite_of: dict, ids: list[int], report_of: dict) -> Selected:
        draws = draws_of.get(row, ())
        reports = tuple(report_of[draw] for draw in draws if draw in report_of)
        return Selected(
            token_ids=tuple(ids[draw] for draw in draws),
            logprobs=reports,
            chosen_logprobs=tuple(report.logprob for report in reports),
            prompt_logprobs=self.scores.get(row, ()),
            finite=finite_of.get(row, True),
        )
