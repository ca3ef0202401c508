"""The judge and the policies: the same data, doubt, loans and ceilings, convergence, what cannot be judged, the
average that lags behind, searches, the radius, and λ."""

from __future__ import annotations

from .mutations import mutation

JUDGEMENT = "tests/optimizer/test_judgement.py"
LOANS = tuple(
    f"{JUDGEMENT}::test_{name}"
    for name in ("uphill_moves_that_do_not_pay_are_taken_back", "uphill_moves_that_pay_go_on")
)
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
RADIUS = "tests/optimizer/test_radius.py"
REWEIGHTED = "tests/optimizer/test_reweighted.py"
DECAY = "tests/optimizer/test_weight_decay.py"
FAILURES = "tests/optimizer/test_failed_steps.py"
SEARCH = "tests/parts/test_line_search.py"
SCHEDULE = "tests/parts/test_schedule.py"
UNITS = "tests/optimizer/test_units.py"
COARSE = "tests/optimizer/test_coarse_parameters.py"
RECORDED = "tests/test_recorded.py"
STATE = "tests/test_state.py"
ITERATION = "tests/test_iteration.py"
ATTEMPT = "tests/test_attempt.py"

MUTATIONS = [
    # the same data
    mutation(
        "policies: repeats are not counted",
        "return self.repeats + 1 if abs(f - self.expected)",
        "return 1 if abs(f - self.expected)",
        SAME,
        STATE,
        ITERATION,
    ),
    mutation(
        "policies: any lower loss is that of the same data",
        "abs(f - self.expected) <= SAME_LOSS[dtype] * size",
        "f - self.expected <= SAME_LOSS[dtype] * size",
        SAME,
        STATE,
        ITERATION,
    ),
    mutation(
        "policies: a loss without a bound is told by its size alone",
        "size = abs(self.expected) if low > -math.inf else max(abs(self.expected), self.height)",
        "size = abs(self.expected)",
        UNITS,
        STATE,
    ),
    mutation(
        "policies: two equal losses are the same data",
        "return self.repeats > 1 # once",
        "return self.repeats > 0  # once",
        SAME,
        ENDS[1],
        ITERATION,
    ),
    mutation(
        "policies: what is steady is known after one step",
        "return None if self.steps < 2 else False",
        "return None if self.steps < 1 else False",
        "tests/curvature/test_auto_work.py::test_the_same_data_have_all_rows",
        STATE,
        "tests/curvature/test_auto_work.py",
    ),
    mutation(
        "policies: the step is expected to have changed nothing",
        "best=min(self.best, f, new_loss), expected=new_loss)",
        "best=min(self.best, f, new_loss), expected=f)",
        SAME,
        STATE,
    ),
    mutation(
        "policies: the best loss leaves the last one out",
        "best=min(self.best, f, new_loss), expected",
        "best=min(self.best, f), expected",
        *LOANS,
        STATE,
    ),
    # weight decay that changes
    mutation(
        "policies: another weight decay moves the expected loss the wrong way",
        "else self.expected + more, decay=here",
        "else self.expected - more, decay=here",
        REWEIGHTED,
    ),
    mutation(
        "policies: another weight decay leaves heights alone",
        "height=max(0.0, self.height + more)",
        "height=self.height",
        REWEIGHTED,
        STATE,
    ),
    mutation(
        "policies: another weight decay moves the best loss with the model, not with the haven",
        "best = more if self.haven is None else away",
        "best = more",
        REWEIGHTED,
        STATE,
    ),
    mutation(
        "policies: weight decay of the haven is forgotten",
        "return old.decayed(level.decay, there[0])",
        "return old.decayed(level.decay, 0.0)",
        REWEIGHTED,
    ),
    mutation(
        "policies: the haven has the weight decay of the model",
        "haven_decay=decay if state.haven is theta else old.haven_decay",
        "haven_decay=decay",
        REWEIGHTED,
        ITERATION,
    ),
    # doubt
    mutation(
        "policies: two strange batches in a row are doubted",
        "if same_data or self.doubted or self.steps < HEARD",
        "if same_data or self.steps < HEARD",
        DOUBT,
        STATE,
    ),
    mutation(
        "policies: doubt begins one step too late",
        "self.doubted or self.steps < HEARD",
        "self.doubted or self.steps <= HEARD",
        DOUBT,
        STATE,
    ),
    mutation(
        "policies: the same data are doubted",
        "if same_data or self.doubted",
        "if self.doubted",
        DOUBT,
        STATE,
        ITERATION,
    ),
    mutation(
        "policies: doubt by the loss and not by its height",
        "(f - self.floor(f, low)) / (UNHEARD * self.height)",
        "f / (UNHEARD * self.height)",
        DOUBT,
        STATE,
    ),
    mutation(
        "policies: ten times more is doubted than was unheard-of",
        "(f - self.floor(f, low)) / (UNHEARD * self.height)",
        "(f - self.floor(f, low)) / self.height",
        DOUBT,
        STATE,
    ),
    mutation(
        "policies: λ does not rise in doubt",
        "used = start.doubt * lam",
        "used = lam",
        CORRUPT,
        DOUBT,
    ),
    mutation(
        "policies: a batch in doubt has a say in λ",
        "if start.doubt > 1: return lam",
        "if start.doubt > math.inf:\n        return lam",
        ITERATION,
        CORRUPT,
        DOUBT,
    ),
    mutation(
        "policies: a batch in doubt has a say in D",
        "if start.doubt > 1: return replace(state, previous=previous)",
        "if start.doubt > math.inf:\n        return replace(state, previous=previous)",
        CORRUPT,
        ITERATION,
    ),
    mutation(
        "policies: a batch in doubt has a say in heights",
        "return replace(state, doubted=True)",
        "return replace(state, doubted=True, height=max(self.height, f))",
        DOUBT,
        STATE,
    ),
    mutation(
        "policies: a doubted batch is not remembered as one",
        "return replace(state, doubted=True)",
        "return replace(state, doubted=False)",
        DOUBT,
        STATE,
    ),
    mutation(
        "policies: in doubt the step is far shorter",
        "(old.stride / math.sqrt(doubt) / space.norm(d))",
        "(old.stride / doubt / space.norm(d))",
        ITERATION,
        CORRUPT,
    ),
    mutation(
        "policies: the stride is that of a doubted step",
        "end.lr * end.length if accepted and doubt == 1 else old.stride",
        "end.lr * end.length if accepted else old.stride",
        ITERATION,
        CORRUPT,
    ),
    mutation(
        "policies: the stride without the learning rate",
        "stride=end.lr * end.length",
        "stride=end.length",
        ITERATION,
        CORRUPT,
    ),
    mutation(
        "policies: heights are those of the last batch",
        "height=max(above, 0.9 * self.height)",
        "height=above",
        STATE,
        DOUBT,
    ),
    mutation(
        "policies: heights above the best loss whatever the bound",
        "above = f - (low if low > -math.inf else state.best)",
        "above = f - state.best",
        DOUBT,
        STATE,
        CORRUPT,
    ),
    # loans, ceilings and the loss of late
    mutation(
        "policies: a loss without a bound has its best for one",
        "min(self.best, f) - BELOW * self.height",
        "min(self.best, f)",
        UNITS,
        STATE,
    ),
    mutation(
        "policies: a loan is overdue one step too late",
        "self.away >= PATIENCE",
        "self.away > PATIENCE",
        LOANS[0],
        STATE,
    ),
    mutation(
        "policies: a loan that has paid is taken back",
        "self.away >= PATIENCE and loss >= self.haven_loss",
        "self.away >= PATIENCE",
        STATE,
        *LOANS,
    ),
    mutation(
        "policies: loans go on when the data change",
        "return replace(self, haven=None, haven_loss=math.inf, away=0, ceiling=math.inf, late=math.inf)",
        "return self",
        STATE,
        ITERATION,
    ),
    mutation(
        "policies: the loss of late falls at once",
        "best + FADE * ((f if self.late == math.inf else self.late) - best)",
        "best + 0.0 * ((f if self.late == math.inf else self.late) - best)",
        STATE,
        BEST,
    ),
    mutation(
        "policies: the loss of late never falls",
        "best + FADE * ((f if self.late == math.inf else self.late) - best)",
        "best + ((f if self.late == math.inf else self.late) - best)",
        STATE,
        BEST,
    ),
    mutation(
        "policies: the haven has the loss after the move",
        "haven_loss=f, away=1)",
        "haven_loss=loss, away=1)",
        *LOANS,
        STATE,
    ),
    mutation(
        "policies: steps away from the haven are not counted",
        "away=self.away + 1, late=late",
        "away=self.away, late=late",
        LOANS[0],
        STATE,
    ),
    mutation(
        "policies: the haven moves with every uphill step",
        "state = replace(self, away=self.away + 1, late=late)",
        "state = replace(home, haven=theta, haven_loss=f, away=self.away + 1)",
        *LOANS,
        STATE,
        ITERATION,
    ),
    mutation(
        "policies: no ceiling after a loan that did not pay",
        "ceiling=low + 1.01 * (loss - low)",
        "ceiling=math.inf",
        LOANS[0],
        STATE,
    ),
    mutation(
        "policies: the ceiling is lifted at once",
        "if loss - low < 0.98 * (state.ceiling - low)",
        "if loss - low < 1.0 * (state.ceiling - low)",
        STATE,
        LOANS[0],
    ),
    mutation(
        "policies: uphill beyond the ceiling",
        "judged and doubt == 1 and f_new <= old.ceiling",
        "judged and doubt == 1",
        ITERATION,
        *LOANS,
    ),
    mutation(
        "policies: uphill in doubt of the batch",
        "judged and doubt == 1 and f_new <= old.ceiling",
        "judged and f_new <= old.ceiling",
        ITERATION,
        CORRUPT,
    ),
    mutation(
        "policies: a return ends with the loss that it gave up",
        'end._replace(rule="return", d=None, loss=old.haven_loss)',
        'end._replace(rule="return", d=None)',
        LOANS[0],
    ),
    mutation(
        "policies: a return stays where it is",
        "lin.parameters.assign(old.haven)",
        "lin.parameters.assign(lin.theta)",
        LOANS[0],
    ),
    # the average
    mutation(
        "policies: the average is behind when it is ahead",
        "return self.lag is not None and self.lag > 0",
        "return self.lag is not None and self.lag < 0",
        AVERAGED,
        STATE,
    ),
    mutation(
        "policies: the lag without the lower bound",
        "(mean_loss - level.low) / (level.f - level.low)",
        "mean_loss / level.f",
        LAG,
        ITERATION,
    ),
    mutation(
        "policies: a lag is told from rounding by f alone",
        "min(level.f, mean_loss) - level.low <= ROUNDINGS",
        "level.f - level.low <= ROUNDINGS",
        ITERATION,
        LAG,
    ),
    mutation(
        "policies: the lag of late is that of the last step",
        "0.8 * past + 0.2 * math.log(lag)",
        "0.2 * past + 0.8 * math.log(lag)",
        AVERAGED,
        ITERATION,
    ),
    mutation(
        "policies: the lag stays on the same data",
        "lag=None if start.same_data else smoothed(old.lag, end.judgement.lag)",
        "lag=smoothed(old.lag, end.judgement.lag)",
        AVERAGED,
        ITERATION,
    ),
    mutation(
        "policies: the averaged loss on the same data too",
        "None if old.mean is None or same_data else",
        "None if old.mean is None else",
        AVERAGED,
        ITERATION,
    ),
    mutation(
        "policies: the average takes loans for steps",
        "theta = parameters.vector() if state.haven is None else state.haven",
        "theta = parameters.vector()",
        ITERATION,
        AVERAGED,
    ),
    mutation(
        "policies: the average begins anew on changing batches",
        "(same_data and parts.average.restarts)",
        "parts.average.restarts",
        AVERAGED,
        ITERATION,
    ),
    # λ, searches and the radius
    mutation(
        "policies: λ falls after a cut step",
        'return max(found, lam) if end.cut or end.rule == "search" else found',
        'return max(found, lam) if end.rule == "search" else found',
        RADIUS,
        ITERATION,
    ),
    mutation(
        "policies: λ falls after a search",
        'return max(found, lam) if end.cut or end.rule == "search" else found',
        "return max(found, lam) if end.cut else found",
        SCHEDULE,
        ITERATION,
    ),
    mutation(
        "policies: λ does not rise after a search either",
        'return max(found, lam) if end.cut or end.rule == "search" else found',
        'return lam if end.cut or end.rule == "search" else found',
        STEP,
        SCHEDULE,
        ITERATION,
    ),
    mutation(
        "policies: the radius without the learning rate",
        "d * (radius / (lr * space.norm(d))).clamp(max=1)",
        "d * (radius / space.norm(d)).clamp(max=1)",
        RADIUS,
    ),
    mutation(
        "policies: short steps are made as long as the radius",
        "d * (radius / (lr * space.norm(d))).clamp(max=1)",
        "d * (radius / (lr * space.norm(d)))",
        RADIUS,
    ),
    mutation(
        "policies: a step as it was counts as cut",
        "self.length < self.uncut",
        "self.length <= self.uncut",
        RADIUS,
        ITERATION,
    ),
    mutation(
        "policies: a search goes beyond the radius",
        "longest = math.inf if parts.radius is None else max(lr, parts.radius / length if length else math.inf)",
        "longest = math.inf",
        RADIUS,
        ATTEMPT,
    ),
    mutation(
        "policies: a search does not know what was tried",
        "tried = (lr, found.new_loss) if line is proposal.d else None",
        "tried = None",
        ATTEMPT,
        SEARCH,
    ),
    mutation(
        "policies: a search along the plain step takes the tried point for one of its own",
        "tried = (lr, found.new_loss) if line is proposal.d else None",
        "tried = (lr, found.new_loss)",
        ATTEMPT,
        SEARCH,
        "tests/fuzz/test_networks.py::test_steps_are_those_of_brute_force",
    ),
    mutation(
        "policies: a search along the other line",
        "line = proposal.d if parts.line_search.along_step else proposal.plain",
        "line = proposal.plain if parts.line_search.along_step else proposal.d",
        SEARCH,
        STEP,
    ),
    mutation(
        "policies: a search in doubt of the batch",
        "lr > 0 and judgement.judged and start.doubt == 1",
        "lr > 0 and judgement.judged",
        CORRUPT,
        ATTEMPT,
    ),
    mutation(
        "policies: a search for what rounding hides",
        "lr > 0 and judgement.judged and start.doubt == 1",
        "lr > 0 and start.doubt == 1",
        HIDDEN,
        MOVES,
        SEARCH,
        ATTEMPT,
    ),
    mutation(
        "policies: rounded weights that stay are rejected",
        "if found.new_loss == start.level.f and lin.parameters.coarse:",
        "if False:",
        COARSE,
        f"{JUDGEMENT}::test_a_model_in_bfloat16_converges",
    ),
    mutation(
        "policies: the previous step without the learning rate",
        "return d if lr == 1 else lr * d",
        "return d",
        STEP,
        ITERATION,
    ),
    # convergence
    mutation(
        "policies: a run has converged with any λ",
        "idle >= IDLE and used <= parts.schedule.initial",
        "idle >= IDLE",
        ITERATION,
        *ENDS,
    ),
    mutation(
        "policies: a run has converged one idle step too late",
        "idle >= IDLE and used",
        "idle > IDLE and used",
        *ENDS,
        ITERATION,
    ),
    mutation(
        "policies: short steps are idle because of the radius",
        "faint = start.same_data and not end.cut and",
        "faint = start.same_data and",
        RADIUS,
        ITERATION,
    ),
    mutation(
        "policies: steps are idle on changing batches",
        "faint = start.same_data and not end.cut and",
        "faint = not end.cut and",
        *ENDS,
        ITERATION,
    ),
    mutation(
        "policies: steps are idle that all in all have found something",
        "if faint and abs(idle_from - end.loss) <= FAINT * rounding else 0",
        "if faint else 0",
        ITERATION,
        *ENDS,
    ),
    mutation(
        "policies: a loss at its bound is not idle",
        "min(end.judgement.predicted, f - low) <= FAINT * rounding",
        "end.judgement.predicted <= FAINT * rounding",
        *ENDS,
        ITERATION,
    ),
    mutation(
        "policies: idle steps begin anew every time",
        "idle_from = old.idle_from if old.idle else f",
        "idle_from = f",
        ITERATION,
        *ENDS,
    ),
    mutation(
        "policies: one more look at the same data before there is doubt",
        "old.doubt(level.f, level.low, repeats > 1)",
        "old.doubt(level.f, level.low, repeats > 0)",
        ITERATION,
        DOUBT,
    ),
]
