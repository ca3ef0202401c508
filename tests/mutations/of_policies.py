"""The judge and the policies: the same data, doubt, uphill moves, convergence, what cannot be judged, the
average that lags behind, searches, the radius, and λ."""

from __future__ import annotations

from .mutations import mutation

JUDGEMENT = "tests/optimizer/test_judgement.py"
BEST = f"{JUDGEMENT}::test_the_loss_stays_with_the_best_after_convergence"
ENDS = tuple(
    f"{JUDGEMENT}::test_{name}"
    for name in (
        "a_loss_of_zero_is_the_end", "nothing_converges_on_changing_batches", "a_run_says_that_it_has_converged",
    )
)  # fmt: skip
CORRUPT = f"{JUDGEMENT}::test_one_corrupt_batch_does_not_end_the_run"
DOUBT = f"{JUDGEMENT}::test_doubt"
HIDDEN = f"{JUDGEMENT}::test_lambda_after_steps_that_rounding_hides"
NO_GRADIENT = f"{JUDGEMENT}::test_batches_without_a_gradient_leave_lambda_alone"
MOVES = f"{JUDGEMENT}::test_a_converged_run_follows_when_the_data_move"
STEP = "tests/optimizer/test_step.py"
SAME = "tests/optimizer/test_step.py::test_knows_the_same_data_again"
AVERAGED = "tests/optimizer/test_averaged.py"
LAG = "tests/optimizer/test_averaged.py::test_the_averaged_loss_of_every_step_by_hand"
DECAY = "tests/optimizer/test_weight_decay.py"
FAILURES = "tests/optimizer/test_exceptions.py"
SEARCH = "tests/parts/test_line_search.py"
SCHEDULE = "tests/parts/test_schedule.py"
COARSE = "tests/optimizer/test_coarse_parameters.py"
RECORDED = "tests/test_recorded.py"
PIECES = "tests/test_step.py"
SAME_DATA, OUTLIERS, LATE, LAGS, CONVERGENCE = (
    f"tests/policies/test_{name}.py" for name in ("same_data", "outliers", "recent", "lag", "convergence")
)

MUTATIONS = [
    # the same data
    mutation(
        "policies: repeats are not counted",
        "return self.repeats + 1 if abs(f - self.expected)",
        "return 1 if abs(f - self.expected)",
        SAME,
        SAME_DATA,
        PIECES,
    ),
    mutation(
        "policies: any lower loss is that of the same data",
        "abs(f - self.expected) <= SAME_LOSS[dtype] * size",
        "f - self.expected <= SAME_LOSS[dtype] * size",
        SAME,
        SAME_DATA,
        PIECES,
    ),
    mutation(
        "policies: a loss without a bound is told by its size alone",
        "size = abs(self.expected) if low > -math.inf else max(abs(self.expected), height)",
        "size = abs(self.expected)",
        STEP,
        SAME_DATA,
    ),
    mutation(
        "policies: two equal losses are the same data",
        "floor, same = old.outliers.floor(best, low), repeats > 1",
        "floor, same = old.outliers.floor(best, low), repeats > 0",
        SAME,
        ENDS[1],
        PIECES,
        SAME_DATA,
    ),
    mutation(
        "policies: what is steady is known after one step",
        "return None if steps < 2 else False",
        "return None if steps < 1 else False",
        "tests/curvature/test_auto_work.py::test_which_rows",
        SAME_DATA,
        "tests/curvature/test_auto_work.py",
    ),
    mutation(
        "policies: the step is expected to have changed nothing",
        "return SameData(start.repeats, end.loss)",
        "return SameData(start.repeats, start.level.f)",
        SAME,
        SAME_DATA,
    ),
    mutation(
        "policies: the best loss leaves the last one out",
        "best = end.loss if end.loss < start.best else start.best",
        "best = start.best",
        PIECES,
    ),
    # weight decay that changes
    mutation(
        "policies: another weight decay moves the expected loss the wrong way",
        "None if self.expected is None else self.expected +",
        "None if self.expected is None else self.expected -",
        DECAY,
        SAME_DATA,
    ),
    mutation(
        "policies: another weight decay leaves heights alone",
        "Outliers(max(0.0, self.height +",
        "Outliers(max(0.0, self.height + 0.0 *",
        DECAY,
        OUTLIERS,
    ),
    # doubt
    mutation(
        "policies: two strange batches in a row are doubted",
        "if same_data or self.doubted or steps < HEARD",
        "if same_data or steps < HEARD",
        DOUBT,
        OUTLIERS,
    ),
    mutation(
        "policies: doubt begins one step too late",
        "self.doubted or steps < HEARD",
        "self.doubted or steps <= HEARD",
        DOUBT,
        OUTLIERS,
    ),
    mutation(
        "policies: the same data are doubted",
        "if same_data or self.doubted",
        "if self.doubted",
        DOUBT,
        OUTLIERS,
        PIECES,
    ),
    mutation(
        "policies: doubt by the loss and not by its height",
        "(f - floor) / (UNHEARD * self.height)",
        "f / (UNHEARD * self.height)",
        DOUBT,
        OUTLIERS,
    ),
    mutation(
        "policies: ten times more is doubted than was unheard-of",
        "(f - floor) / (UNHEARD * self.height)",
        "(f - floor) / self.height",
        DOUBT,
        OUTLIERS,
    ),
    mutation(
        "policies: λ does not rise in doubt",
        "used = start.doubt * lam",
        "used = lam",
        f"{JUDGEMENT}::test_lambda_is_larger_in_doubt_of_a_batch",
        CORRUPT,
        DOUBT,
        OUTLIERS,
    ),
    mutation(
        "policies: a batch in doubt has a say in λ",
        "if start.doubt > 1: return lam",
        "if start.doubt > math.inf:\n        return lam",
        PIECES,
        CORRUPT,
        DOUBT,
        OUTLIERS,
    ),
    mutation(
        "policies: a batch in doubt has a say in D",
        "if start.doubt > 1: return previous",
        "if start.doubt > math.inf:\n        return previous",
        CORRUPT,
        PIECES,
        OUTLIERS,
    ),
    mutation(
        "policies: a batch in doubt has a say in heights",
        "return Outliers(self.height, self.stride, True)",
        "return Outliers(max(self.height, start.level.f), self.stride, True)",
        DOUBT,
        OUTLIERS,
    ),
    mutation(
        "policies: a doubted batch is not remembered as one",
        "return Outliers(self.height, self.stride, True)",
        "return Outliers(self.height, self.stride, False)",
        DOUBT,
        OUTLIERS,
    ),
    mutation(
        "policies: in doubt the step is far shorter",
        "(old.outliers.stride / math.sqrt(doubt) / space.norm(d))",
        "(old.outliers.stride / doubt / space.norm(d))",
        PIECES,
        CORRUPT,
        OUTLIERS,
    ),
    mutation(
        "policies: the stride is that of a doubted step",
        "return Outliers(self.height, self.stride, True)",
        "return Outliers(self.height, self.stride if end.d is None else end.lr * end.length, True)",
        PIECES,
        CORRUPT,
        OUTLIERS,
    ),
    mutation(
        "policies: the stride without the learning rate",
        "self.stride if end.d is None else end.lr * end.length",
        "self.stride if end.d is None else end.length",
        PIECES,
        CORRUPT,
        OUTLIERS,
    ),
    mutation(
        "policies: heights are those of the last batch",
        "Outliers(max(above, 0.9 * self.height), stride, False)",
        "Outliers(above, stride, False)",
        OUTLIERS,
        DOUBT,
    ),
    mutation(
        "policies: heights above the best loss whatever the bound",
        "above = f - (low if low > -math.inf else min(start.best, end.loss))",
        "above = f - min(start.best, end.loss)",
        DOUBT,
        OUTLIERS,
        CORRUPT,
    ),
    # the loss of late
    mutation(
        "policies: a loss without a bound has its best for one",
        "low if low > -math.inf else best - BELOW * self.height",
        "low if low > -math.inf else best",
        STEP,
        OUTLIERS,
    ),
    mutation(
        "policies: the loss of late stays when the data change",
        "return Recent()",
        "return self",
        LATE,
        PIECES,
    ),
    mutation(
        "policies: the loss of late falls at once",
        "least + FADE *",
        "least + 0.0 *",
        LATE,
        BEST,
    ),
    mutation(
        "policies: the loss of late never falls",
        "least + FADE *",
        "least + 1.0 *",
        LATE,
        BEST,
    ),
    mutation(
        "policies: uphill in doubt of the batch",
        "return start.doubt == 1",
        "return True",
        PIECES,
        CORRUPT,
        OUTLIERS,
    ),
    # the average
    mutation(
        "policies: the average is behind when it is ahead",
        "return self.lag is not None and self.lag > 0",
        "return self.lag is not None and self.lag < 0",
        AVERAGED,
        LAGS,
    ),
    mutation(
        "policies: the lag without the lower bound",
        "else (mean_loss - low) / (f - low)",
        "else mean_loss / f",
        LAG,
        PIECES,
        LAGS,
    ),
    mutation(
        "policies: a lag is told from rounding by f alone",
        "min(f, mean_loss) - low <= least",
        "f - low <= least",
        PIECES,
        LAG,
        LAGS,
    ),
    mutation(
        "policies: the lag of late is that of the last step",
        "0.8 * past + 0.2 * math.log(lag)",
        "0.2 * past + 0.8 * math.log(lag)",
        AVERAGED,
        PIECES,
        LAGS,
    ),
    mutation(
        "policies: the lag stays on the same data",
        "lag = None if start.same_data else smoothed(self.lag, end.judgement.lag)",
        "lag = smoothed(self.lag, end.judgement.lag)",
        AVERAGED,
        PIECES,
        LAGS,
    ),
    mutation(
        "policies: the averaged loss on the same data too",
        "None if old.mean is None or same_data else",
        "None if old.mean is None else",
        AVERAGED,
        PIECES,
        LAGS,
    ),
    mutation(
        "policies: the average begins anew on changing batches",
        "(start.same_data and average.restarts)",
        "average.restarts",
        AVERAGED,
        PIECES,
        LAGS,
    ),
    # λ, searches and the radius
    mutation(
        "policies: λ falls after a cut step",
        'return max(found, lam) if end.cut or end.rule == "search" else found',
        'return max(found, lam) if end.rule == "search" else found',
        STEP,
        PIECES,
    ),
    mutation(
        "policies: λ falls after a search",
        'return max(found, lam) if end.cut or end.rule == "search" else found',
        "return max(found, lam) if end.cut else found",
        SCHEDULE,
        PIECES,
    ),
    mutation(
        "policies: λ does not rise after a search either",
        'return max(found, lam) if end.cut or end.rule == "search" else found',
        'return lam if end.cut or end.rule == "search" else found',
        STEP,
        SCHEDULE,
        PIECES,
    ),
    mutation(
        "policies: the radius without the learning rate",
        "d * (radius / (lr * space.norm(d))).clamp(max=1)",
        "d * (radius / space.norm(d)).clamp(max=1)",
        STEP,
    ),
    mutation(
        "policies: short steps are made as long as the radius",
        "d * (radius / (lr * space.norm(d))).clamp(max=1)",
        "d * (radius / (lr * space.norm(d)))",
        STEP,
    ),
    mutation(
        "policies: a step as it was counts as cut",
        "self.length < self.uncut",
        "self.length <= self.uncut",
        STEP,
        PIECES,
    ),
    mutation(
        "policies: a search goes beyond the radius",
        "longest = math.inf if radius is None else max(lr, radius / length if length else math.inf)",
        "longest = math.inf",
        STEP,
        PIECES,
    ),
    mutation(
        "policies: a search does not know what was tried",
        "tried = (lr, end.found.new_loss) if line is d else None",
        "tried = None",
        PIECES,
        SEARCH,
    ),
    mutation(
        "policies: a search along the plain step takes the tried point for one of its own",
        "tried = (lr, end.found.new_loss) if line is d else None",
        "tried = (lr, end.found.new_loss)",
        PIECES,
        SEARCH,
        "tests/fuzz/test_networks.py::test_steps_are_those_of_brute_force",
    ),
    mutation(
        "policies: a search along the other line",
        "line = d if search.along_step else plain",
        "line = plain if search.along_step else d",
        SEARCH,
        STEP,
    ),
    mutation(
        "policies: a search in doubt of the batch",
        "or not end.judgement.judged or start.doubt > 1:",
        "or not end.judgement.judged:",
        CORRUPT,
        PIECES,
        OUTLIERS,
    ),
    mutation(
        "policies: a search for what rounding hides",
        "or not end.judgement.judged or start.doubt > 1:",
        "or start.doubt > 1:",
        HIDDEN,
        MOVES,
        SEARCH,
        PIECES,
    ),
    mutation(
        "policies: rounded weights that stay are rejected",
        "if coarse and found.new_loss == f:",
        "if False:",
        f"{PIECES}::test_weights_that_are_rounded_to_what_they_were_go_on",
        COARSE,
        f"{JUDGEMENT}::test_a_model_in_bfloat16_converges",
    ),
    mutation(
        "policies: the previous step without the learning rate",
        "else d if lr == 1 else lr * d",
        "else d",
        STEP,
        PIECES,
    ),
    # convergence
    mutation(
        "policies: a run has converged with any λ",
        "return self.idle >= IDLE and lam <= initial",
        "return self.idle >= IDLE",
        PIECES,
        *ENDS,
        CONVERGENCE,
    ),
    mutation(
        "policies: a run has converged one idle step too late",
        "self.idle >= IDLE and lam",
        "self.idle > IDLE and lam",
        *ENDS,
        PIECES,
        CONVERGENCE,
    ),
    mutation(
        "policies: short steps are idle because of the radius",
        "faint = start.same_data and not end.cut and",
        "faint = start.same_data and",
        STEP,
        PIECES,
        CONVERGENCE,
    ),
    mutation(
        "policies: steps are idle on changing batches",
        "faint = start.same_data and not end.cut and",
        "faint = not end.cut and",
        *ENDS,
        PIECES,
        CONVERGENCE,
    ),
    mutation(
        "policies: steps are idle that all in all have found something",
        "if faint and abs(idle_from - end.loss) <= FAINT * rounding else 0",
        "if faint else 0",
        PIECES,
        *ENDS,
        CONVERGENCE,
    ),
    mutation(
        "policies: a loss at its bound is not idle",
        "min(end.judgement.predicted, f - low) <= FAINT * rounding",
        "end.judgement.predicted <= FAINT * rounding",
        *ENDS,
        PIECES,
        CONVERGENCE,
    ),
    mutation(
        "policies: idle steps begin anew every time",
        "idle_from = self.idle_from if self.idle else f",
        "idle_from = f",
        PIECES,
        *ENDS,
        CONVERGENCE,
    ),
    mutation(
        "policies: one more look at the same data before there is doubt",
        "old.outliers.doubt(f, floor, old.steps, same)",
        "old.outliers.doubt(f, floor, old.steps, repeats > 0)",
        PIECES,
        DOUBT,
        OUTLIERS,
    ),
]
