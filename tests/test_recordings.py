"""Which steps are recorded, which replays are looked at, and when a recording is dropped."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt import recordings
from marquardt.recordings import LOOK, RECORDERS
from support.recorder import Repeated
from support.reference import error
from support.steps import state, theta


class Model(nn.Sequential):
    temperature = 1.0

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.temperature


def data(seed: int, N: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (N,), generator=generator)


# All steps are of one kind with these: the first ones form their own D by default.
PLAIN = {"damping": mq.MeanEigenvalue(), "rows": mq.Exact()}


@pytest.fixture
def made(monkeypatch):
    """An optimizer on a CPU whose steps can be recorded, and its recorder."""

    def make(model: nn.Module, **options) -> tuple[mq.LM, Repeated]:
        recorder = Repeated(model)
        monkeypatch.setitem(RECORDERS, "cpu", recorder)
        return mq.LM(model, "cross_entropy", **{**PLAIN, **options}), recorder

    return make


def train(opt: mq.LM, steps: int, first: int = 0) -> list[mq.Step]:
    return [opt.step(*data(first + i)) for i in range(steps)]


# The first step proves what the others rely on, and with the third the plan is made for good. From the fourth on there
# are replays.
BEFORE = 3


def test_a_plan_that_the_next_step_will_change_is_not_recorded(made):
    """The third step is the first to know that the data change, and takes fewer rows then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 5)).double()
    twin = copy.deepcopy(model)
    options = {**PLAIN, "rows": None, "curvature": mq.Auto(work=2)}
    opt, recorder = made(model, **options)
    plain = mq.LM(twin, "cross_entropy", capture=False, **options)
    for i in range(12):
        opt.step(*data(i, 60))
        plain.step(*data(i, 60))
        assert opt.plan.partition(";")[0] == plain.plan.partition(";")[0]
    assert "2 of 4 rows" in opt.plan
    assert recorder.replays > 5
    assert error(theta(model), theta(twin)) < 1e-7


def test_steps_are_recorded_by_themselves_and_stay_what_they_are(made):
    model = Model()
    twin = copy.deepcopy(model)
    opt, recorder = made(model)
    plain = mq.LM(twin, "cross_entropy", capture=False, **PLAIN)
    for i in range(40):
        here, there = opt.step(*data(i)), plain.step(*data(i))
        assert (here.rule, here.lam) == (there.rule, pytest.approx(there.lam))
        assert (recorder.recordings, recorder.replays) == (i >= BEFORE, max(0, i - BEFORE + 1))
    assert error(theta(model), theta(twin)) < 1e-7
    assert "steps are recorded" in repr(opt)
    one, other = opt.state_dict()["marquardt"], plain.state_dict()["marquardt"]
    assert one.keys() == other.keys()  # nothing of it is saved


@pytest.mark.parametrize("options", [{"capture": False}, {"rows": mq.Fraction(0.5)}], ids=["forbidden", "fraction"])
def test_steps_that_shall_or_can_not_be_recorded_are_not(made, options):
    opt, recorder = made(Model(), **options)
    train(opt, 10)
    assert recorder.recordings == 0


def test_replays_are_looked_at_less_and_less(made):
    """The eighth, the sixteenth, the thirty-second and so on: the model is called beside each. No step is repeated."""
    opt, recorder = made(Model())
    calls, seen = [], []
    opt.model.register_forward_hook(lambda *_: calls.append(1))
    opt.capture = True  # also with this hook
    for i in range(70):
        calls.clear()
        opt.step(*data(i))
        seen.append(len(calls))
    # A replay calls it here where a step begins, with averaged weights, and at the trial point.
    assert set(seen[BEFORE + 1 :]) == {3, 4}
    assert [i + 1 for i, n in enumerate(seen[BEFORE:]) if n == 4] == [LOOK, 2 * LOOK, 4 * LOOK, 8 * LOOK]
    assert (recorder.recordings, recorder.replays) == (1, 70 - BEFORE)


def test_a_step_that_cannot_be_recorded_goes_on_in_silence(made):
    """Unless it was asked for."""

    class Refused(Repeated):
        def record(self, work):
            self.recordings += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    for options in ({}, {"capture": True}):
        model = Model()
        opt, _ = made(model, **options)
        refused = RECORDERS["cpu"] = Refused(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(opt, 16)
        assert [str(w.message) for w in caught if "recorded" in str(w.message)][1:] == []
        assert bool(caught) == bool(options)
        assert refused.recordings == 1  # not tried again
        assert "not permitted" in repr(opt)


@pytest.mark.parametrize("forced", [True, None])
def test_a_recording_for_which_there_is_no_memory_is_not_made(made, monkeypatch, forced):
    """Unless it was asked for."""
    opt, recorder = made(Model(), capture=forced)
    train(opt, 2)
    monkeypatch.setattr(recordings, "free", lambda device: 2 * state(opt)["plan"]["bytes"] - 1)
    train(opt, 16)
    assert recorder.recordings == bool(forced)
    assert ("there is no memory for it" in repr(opt)) != bool(forced)


def test_a_model_that_was_changed_is_not_replayed_as_it_was(made):
    """Its Python code does not run in a replay: what it holds is looked at in every step."""
    opt, recorder = made(Model())
    train(opt, 6)
    assert recorder.replays
    opt.model.temperature = 2.0
    twin = copy.deepcopy(opt.model)
    plain = mq.LM(twin, "cross_entropy", capture=False, **PLAIN)
    plain.load_state_dict(opt.state_dict())
    train(opt, 3)
    train(plain, 3)
    assert error(theta(opt.model), theta(twin)) < 1e-7


class Elsewhere(Model):
    """Takes a number from where no recording can see it. The work is recorded with the number of that time."""

    number = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.number


@pytest.mark.parametrize("forced", [True, None])
def test_a_recording_that_has_lost_the_model_is_dropped_at_the_next_look(made, monkeypatch, forced):
    opt, recorder = made(Elsewhere(), capture=forced)
    train(opt, BEFORE + LOOK + 1)  # one after the first look
    assert "steps are recorded" in repr(opt)
    replay = recorder.replay

    def with_the_old_number() -> None:
        monkeypatch.setattr(Elsewhere, "number", 1.0)
        replay()
        monkeypatch.setattr(Elsewhere, "number", 2.0)

    recorder.replay = with_the_old_number
    monkeypatch.setattr(Elsewhere, "number", 2.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(opt, LOOK)
    assert "does not do the same" in repr(opt)
    assert ["does not do the same" in str(w.message) for w in caught] == [True]


class Holder:
    def __init__(self, value: object) -> None:
        self.value = value


class Scaled(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def another_module(m: nn.Module) -> None:
    m[1] = copy.deepcopy(m[1])
    m[1].some.append(0)


CHANGES = {
    "number": lambda m: setattr(m[1], "scale", 2.0),
    "list": lambda m: m[1].some.append(1),
    "tensor": lambda m: m[1].mask.add_(1),
    "object": lambda m: setattr(m[1].holder, "value", 3),
    "module": another_module,
}
MAKES = {
    # What a module is shows in none of its attributes, nor does a hook of all modules.
    "class of a module": lambda m: m.__setitem__(1, nn.ReLU()),
    "class": lambda m: setattr(m, "__class__", Scaled),
    "hook of all": lambda m: nn.modules.module.register_module_forward_hook(lambda module, args, out: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_whose_attributes_have_changed_is_not_just_replayed(made, change):
    """It is called more often than by a replay."""
    model, calls, seen = Model(), [], []
    model[1].scale, model[1].some, model[1].mask, model[1].holder = 1.0, [0, {"k": 1}], torch.ones(2), Holder(2)
    opt, _ = made(model, capture=True)
    model.register_forward_hook(lambda *_: calls.append(1))
    train(opt, BEFORE + 2)
    for i in range(3):
        CHANGES[change](model) if i == 1 else None
        calls.clear()
        train(opt, 1, first=100 + i)
        seen.append(len(calls))
    assert seen[0] == seen[2] == 3 < seen[1]


@pytest.mark.parametrize("forced", [True, None])
@pytest.mark.parametrize("make", MAKES)
def test_a_model_of_another_make_is_not_replayed(made, make, forced):
    opt, recorder = made(Model(), capture=forced)
    train(opt, 2 * BEFORE + 2)
    before = recorder.replays
    handle = MAKES[make](opt.model)
    try:
        train(opt, 1, first=100)
        assert recorder.replays == before
    finally:
        if handle is not None:
            handle.remove()


def test_hooks_and_deterministic_runs_are_left_alone(made):
    """A hook would not be called in a replay, and whether there is one depends on the clock."""
    opt, recorder = made(Model())
    calls = []
    hook = opt.model[0].register_forward_hook(lambda *args: calls.append(1))
    train(opt, 2 * BEFORE + 2)
    assert recorder.recordings == 0
    hook.remove()
    torch.use_deterministic_algorithms(True)
    try:
        train(opt, 2 * BEFORE + 2)
        assert recorder.recordings == 0
    finally:
        torch.use_deterministic_algorithms(False)
    train(opt, 2 * BEFORE + 2)
    assert recorder.recordings == 1


def test_batches_of_several_sizes(made):
    """Kinds that take turns are not recorded over and over, and the last batch of an epoch, which is shorter than the
    others and done without, leaves the recording."""
    opt, recorder = made(Model())
    for i in range(120):
        opt.step(*data(i, 30 if i % 4 < 2 else 20))
    assert 1 <= recorder.recordings <= 6
    opt, recorder = made(Model())
    for i in range(40):
        opt.step(*data(i, 20 if i % 10 == 9 else 30))
    assert (recorder.recordings, recorder.replays) == (1, 40 - BEFORE - 4)


def test_copies_begin_without_a_recording(made):
    opt, recorder = made(Model())
    train(opt, 2 * BEFORE + 2)
    assert "recorded" in repr(opt)
    for again in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert again.capture is None
        assert "recorded" not in repr(again)
        assert again.state_dict()["marquardt"].keys() == opt.state_dict()["marquardt"].keys()
    opt.load_state_dict(opt.state_dict())
    replays = recorder.replays
    train(opt, 2)
    assert recorder.replays > replays  # the recording is of the model, not of the state
