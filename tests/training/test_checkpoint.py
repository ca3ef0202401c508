"""A fit that is killed and goes on ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.training import checkpoint
from support import fit_program
from support.fits import KINDS, net, noisy_sine, refused, weights

X, Y = noisy_sine()


class Killed(BaseException):
    """Nothing of the fit may catch it."""


@pytest.fixture
def always(monkeypatch):
    """A checkpoint after every step."""
    monkeypatch.setattr(checkpoint, "SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", 0.0)


def kill_at(step, error=Killed):
    def kill(running):
        if running.step.step == step:
            raise error

    return kill


def fitted(kind, **options):
    model, arguments = KINDS[kind]()
    return mq.fit(model, loss="mse", **{**arguments, **options})


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[1, 3], [4, 8]], ids=str)
def test_a_killed_fit_goes_on(kind, steps, tmp_path):
    """At any step: the weights, the history and what comes next of all random numbers. So does an interrupted one."""
    file = tmp_path / "fit.pt"
    want = fitted(kind)
    after = torch.get_rng_state()
    for step in steps:
        with pytest.raises(Killed):
            fitted(kind, checkpoint=file, callbacks=kill_at(step + 1))  # after the checkpoint of the step before
        torch.rand(7)  # another process has other random numbers
    if steps == [1, 3]:
        fitted(kind, checkpoint=file, callbacks=kill_at(6, KeyboardInterrupt))
    found = fitted(kind, checkpoint=file)
    assert f"goes on after step {8 if steps == [4, 8] else 5}" in found.plan
    assert found.history == want.history
    assert torch.equal(weights(found.model), weights(want.model))
    assert (found.reason, found.best_step, found.loss) == (want.reason, want.best_step, want.loss)
    assert torch.equal(torch.get_rng_state(), after)
    assert found.evidence == want.evidence


def test_a_killed_process(tmp_path):
    """os._exit, as by kill -9."""
    file, program = tmp_path / "fit.pt", Path(fit_program.__file__)
    place = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, str(program), str(file), "mini", "6"], env=place).returncode == 9
    assert len(torch.load(file, weights_only=True)["history"]["step"]) == 5
    found, want = fitted("mini", checkpoint=file), fitted("mini")
    assert found.history == want.history
    assert torch.equal(weights(found.model), weights(want.model))


@pytest.mark.usefixtures("always")
def test_a_fit_that_has_ended_is_returned_as_it_was(tmp_path):
    file = tmp_path / "fit.pt"
    want = fitted("whole", checkpoint=file)
    again = fitted("whole", checkpoint=file)
    assert (again.history, again.reason) == (want.history, want.reason)
    assert torch.equal(weights(again.model), weights(want.model))
    longer = fitted("whole", checkpoint=file, steps=20)
    assert longer.history == fitted("whole", steps=20).history
    assert len(fitted("whole", checkpoint=file, resume=False, steps=3).history) == 3
    assert len(torch.load(file, weights_only=True)["history"]["step"]) == 3


# The file.


def test_it_is_written_now_and_then(tmp_path, monkeypatch):
    """After the last step in any case; otherwise if a second is over, and less often if to write it takes long."""
    now, written = [0.0], []
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(checkpoint.files, "save", lambda path, content: written.append(len(content["history"]["step"])))

    def tick(running):
        now[0] += 0.3

    mq.fit(net(), (X, Y), "mse", checkpoint=tmp_path / "fit.pt", steps=10, callbacks=tick)
    assert written == [4, 8, 10]
    saver = checkpoint.Saver(Path("fit.pt"), {}, took=2.0, last=now[0] - 30)
    assert not saver.due
    saver.took = 1.0
    assert saver.due


def test_files_beside_it_are_the_users(tmp_path):
    """Also one with a name that a file under way might have. Where the path itself is a link, its file is written."""
    (tmp_path / "scratch").mkdir()
    mine = [tmp_path / name for name in ("fit.pt.tmp", "fit.part", "fit.1a2b3c4d.part")]
    for path in mine:
        path.write_text("mine")
    (tmp_path / "link.pt").symlink_to(tmp_path / "scratch" / "fit.pt")
    for file in ("fit.pt", "link.pt"):
        fitted("whole", checkpoint=tmp_path / file, steps=2)
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert len(os.listdir(tmp_path)) == 6
    assert (tmp_path / "link.pt").is_symlink()
    assert "goes on after step 2" in fitted("whole", checkpoint=tmp_path / "scratch" / "fit.pt").plan


def test_it_is_whole_or_not_there(tmp_path, monkeypatch):
    """What fails while it is written leaves the last file as it was, and no other; the second of two fits may begin and
    end while the first one writes."""
    file, true, under_way = tmp_path / "fit.pt", os.fsync, []
    fitted("whole", checkpoint=file, steps=2)
    before = file.read_bytes()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(OSError, match="disk full"):
                fitted("whole", checkpoint=file, steps=4)
        assert (file.read_bytes(), os.listdir(tmp_path)) == (before, ["fit.pt"])

    def fsync(number):
        true(number)
        if not under_way:
            under_way.append(1)
            fitted("whole", checkpoint=file, steps=2, resume=False)

    monkeypatch.setattr(os, "fsync", fsync)
    fitted("whole", checkpoint=file, steps=3)
    assert len(fitted("whole", checkpoint=file, steps=4).history) == 4


@pytest.mark.parametrize("what", ["a file", "a folder"])
def test_damage_is_noticed_before_anything_changes(what, tmp_path):
    place = tmp_path / "fit.pt"
    if what == "a folder":
        place.mkdir()
    fitted("mini", checkpoint=place, steps=3)
    drawn = random.Random(0)
    for path in [place] if what == "a file" else [p for p in place.glob("1/*") if p.suffix == ".pt"]:
        true = path.read_bytes()
        for k in (*drawn.sample(range(len(true)), 40), len(true) - 1):
            path.write_bytes(true[:k] + bytes([true[k] ^ 1 << drawn.randrange(8)]) + true[k + 1 :])
            model, arguments = KINDS["mini"]()
            with refused(model, re.escape(path.name)):
                mq.fit(model, loss="mse", **arguments, checkpoint=place)
        path.write_bytes(true)


def test_what_replaces_a_file_of_an_earlier_version(tmp_path):
    """It has no checksum, and is gone on with."""
    file = tmp_path / "fit.pt"
    fitted("whole", checkpoint=file, steps=3)
    content = torch.load(file, weights_only=True)
    torch.save({**content, "marquardt.fit": 4}, file)
    assert len(fitted("whole", checkpoint=file).history) == 9
    assert torch.load(file, weights_only=True)["marquardt.fit"] > 4
    torch.save(torch.load(file, weights_only=True), file)
    with pytest.raises(ValueError, match=r"it has lost its checksum\. Move it away"):
        fitted("whole", checkpoint=file)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The arguments of a fit whose checkpoint is there, and of one by evidence."""
    file = tmp_path_factory.mktemp("saved") / "fit.pt"
    same = {"data": (X, Y), "loss": "mse", "validation": (X, Y), "checkpoint": file, "steps": 2}
    mq.fit(net(), **same)
    rule = {**same, "checkpoint": file.with_name("rule.pt"), "weight_decay": mq.Evidence(every=3)}
    mq.fit(net(), **rule)
    return same, rule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": net(hidden=9)}, "another model: parameters is {'0.weight': [9, 1]"),
        ({"model": nn.Sequential(*net(), nn.Tanh(), nn.Linear(1, 1).double())}, "another model: parameters"),
        ({"model": net().float()}, "another model: precision is {'0.weight': 'torch.float32'"),
        (
            {"model": nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)).double()},
            "another model: layers is {'1': 'ReLU()'} now, and was {'1': 'Tanh()'}",
        ),
        ({"loss": "huber"}, "another model: loss is"),
        ({"data": (X, Y + 1e-3)}, "other data: samples is [40,"),
        ({"data": (X.flip(0), Y.flip(0))}, "other data: samples is"),
        ({"validation": None}, "other data: validation is None now"),
        ({"validation": 0.3}, "other data: samples"),
        ({"weight_decay": 0.5}, "other options: weight_decay is ['0.5'"),
        ({"damping": mq.Identity()}, "other options: damping is 'Identity()' now, and was 'KroneckerMetric()'"),
        ({"attempts": 3}, "other options: attempts is 3 now, and was 1"),
        ({"seed": 1}, "other options: seed is 1 now, and was 0"),
        ({"batch_size": 10}, "other options: batches is ['mini', 10] now, and was ['whole', None]"),
        ({"weight_decay": mq.Evidence(every=2)}, "other options: "),
        ({"rule": mq.Evidence(every=4)}, "evidence is 'Evidence(every=4)' now, and was 'Evidence(every=3)'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_model_data_or_options_are_refused(change, message, saved):
    same, rule = saved
    given = {**rule, "weight_decay": change["rule"]} if "rule" in change else {**same, **change}
    given = {"model": net(), **given}
    with refused(given["model"], rf"is of .*{re.escape(message)}.*Begin anew with resume=False"):
        mq.fit(**given)


class Bent(nn.Module):
    """What it computes is told by no name of a layer."""

    def __init__(self, bend, frozen=1.0):
        super().__init__()
        self.first, self.last, self.bend = nn.Linear(1, 8), nn.Linear(8, 1), bend
        self.factor = nn.Parameter(torch.tensor(frozen), requires_grad=False)
        self.double()

    def forward(self, x):
        return self.factor * self.last(self.bend(self.first(x)))


@pytest.mark.parametrize("model", [Bent(torch.relu), Bent(torch.tanh, 1.1)], ids=["code", "frozen weights"])
@pytest.mark.parametrize("batch_size", [None, 10])
def test_another_computation_is_refused(model, batch_size, tmp_path):
    same = {"data": (X, Y), "loss": "mse", "checkpoint": tmp_path / "fit.pt", "batch_size": batch_size}
    mq.fit(Bent(torch.tanh), **same, steps=2)
    with refused(model, "of another model: with the saved weights its outputs are not what they were"):
        mq.fit(model, **same, steps=3)
    assert len(mq.fit(Bent(torch.tanh), **same, steps=3).history) == 3


class Noisy(nn.Linear):
    """Draws random numbers in eval mode, too, and has options that train"""

    def forward(self, x):
        return super().forward(x) + 0.1 * torch.randn(len(x), 1, dtype=x.dtype)

    def extra_repr(self):
        return f"{float(self.bias.detach()):.4f}"


class TrainsOnly(nn.Linear):
    def forward(self, x):
        assert self.training
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:the loss of the model in eval mode cannot be found")
@pytest.mark.parametrize("kind", [Noisy, TrainsOnly])
def test_models_that_cannot_be_compared_go_on(kind, tmp_path):
    for steps in (2, 3):
        found = mq.fit(kind(1, 1).double(), (X, Y), "mse", checkpoint=tmp_path / "fit.pt", steps=steps)
        assert len(found.history) == steps


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None], ids=["empty", "text", "other"])
def test_files_that_are_no_checkpoint(content, tmp_path):
    """They are not read, and not replaced unless there is nothing in them."""
    file, given = tmp_path / "fit.pt", {"data": (X, Y), "loss": "mse", "checkpoint": tmp_path / "fit.pt", "steps": 2}
    if content is None:
        torch.save({"weights": 1}, file)
    else:
        file.write_bytes(content)
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"no checkpoint.*name another file"):
        mq.fit(net(), **given)
    if content == b"":
        assert mq.fit(net(), **given, resume=False).best_step == 2
        return
    words = r"is no checkpoint of mq\.fit, or a damaged one, and would be replaced.* move this one away"
    with pytest.raises(ValueError, match=words):
        mq.fit(net(), **given, resume=False)
    assert file.read_bytes() == before


# What a file under a checksum that is right may hold, and the word of the error that names it.
UNFIT = {
    "weights of another shape": (lambda state: state["weights"].update({"0.weight": torch.zeros(2, 2)}), "weights"),
    "weights missing": (lambda state: state["weights"].pop("0.bias"), "weights"),
    "weights of integers": (lambda state: state["weights"].update({"0.bias": torch.zeros(6, dtype=int)}), "weights"),
    "weights that are NaN": (lambda state: state["weights"]["0.bias"].fill_(float("nan")), "NaN"),
    "best weights that are NaN": (lambda state: state["best"]["0.bias"].fill_(float("nan")), "NaN"),
    "best weights that are none": (lambda state: state.update(best=[1]), "best"),
    "history cut": (lambda state: state["history"]["loss"].pop(), "history"),
    "history without a column": (lambda state: state["history"].pop("lam"), "history"),
    "history of words": (lambda state: state["history"]["lam"].__setitem__(0, "1"), "lam"),
    "steps that are negative": (lambda state: state["seen"].update(best_step=-1), "best_step"),
    "a loss that is a string": (lambda state: state["seen"].update(least="1"), "least"),
    "an optimizer of words": (lambda state: state["optimizer"]["marquardt"].update(steps="3"), "steps"),
    "a rate that is NaN": (lambda state: state["optimizer"]["param_groups"][0].update(lr=float("nan")), "lr=nan"),
    "an order that is none": (lambda state: state.update(order={"epoch": 0, "index": 0.5}), "index"),
    "random numbers cut": (lambda state: state["generators"].update(torch=torch.zeros(3)), "torch"),
    "random numbers of NumPy": (lambda state: state["generators"]["numpy"].__setitem__(2, 10**6), "numpy"),
    "those before the epoch cut": (lambda state: state["began"].update(python=[3, [1], None]), "python"),
    "seconds that are none": (lambda state: state.update(seconds=None), "seconds"),
    "without an entry": (lambda state: state.pop("seen"), "seen"),
}


@pytest.fixture
def begun(always, tmp_path):
    """A file that a killed fit has left."""
    file = tmp_path / "fit.pt"
    with pytest.raises(Killed):
        fitted("mini", checkpoint=file, callbacks=kill_at(4))
    return file


@pytest.mark.parametrize("case", UNFIT)
def test_a_damaged_checkpoint_changes_nothing(case, begun, monkeypatch):
    (edit, says), load = UNFIT[case], checkpoint.Saver.load

    def damaged(saver):
        found, ranks = load(saver)
        edit({**found, **ranks[0]} if case.startswith(("random", "those")) else found)
        return found, ranks

    monkeypatch.setattr(checkpoint.Saver, "load", damaged)
    model, arguments = KINDS["mini"]()
    with refused(model, rf"fit\.pt cannot be gone on with: .*{says}"):
        mq.fit(model, loss="mse", **arguments, checkpoint=begun)
    monkeypatch.undo()
    assert "goes on after step" in fitted("mini", checkpoint=begun).plan


def test_what_ends_a_fit_while_it_is_taken_up_is_taken_back(begun, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    model, arguments = KINDS["mini"]()
    before, drawn = weights(model), torch.get_rng_state()
    monkeypatch.setattr(mq.training.run, "set_generators", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mq.fit(model, loss="mse", **arguments, checkpoint=begun)
    monkeypatch.undo()
    assert torch.equal(weights(model), before)
    assert torch.equal(torch.get_rng_state(), drawn)
