"""`python -m marquardt.paper.runs`: the runs without the command line, where torch is all there is."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from marquardt.paper import runs
from marquardt.paper.methods import METHODS
from support.made_runs import LABELS, digits, lines_of, room_for

FORBIDDEN = {"jinja2", "matplotlib", "mlxtend", "optuna", "psgd_torch", "rich", "scipy", "sklearn", "typer"}


def python(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=environment)


def test_torch_is_all_that_runs_need():
    # What torch itself loads does not count, numpy among it.
    code = "import sys, torch, numpy, torch.distributed.nn.functional; before = set(sys.modules); "
    code += "import marquardt.paper.runs; print(*sys.modules); "
    done = python("-c", code + "print(*set(sys.modules) - before)")
    assert done.returncode == 0, done.stderr
    everything, new = ({name.split(".")[0] for name in line.split()} for line in done.stdout.splitlines())
    assert "marquardt" in new
    assert not everything & FORBIDDEN
    assert new - sys.stdlib_module_names <= {"marquardt", "torch", "numpy"}


def test_help():
    done = python("-m", "marquardt.paper.runs", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ["python -m marquardt.paper.runs", "--full", "--optimizers", "--tuned", *LABELS]:
        assert word in done.stdout


@pytest.fixture
def main(tmp_path, monkeypatch):
    """The module's own command, on runs of two steps."""
    monkeypatch.setattr(runs, "SINE_STEPS", 2)
    small = runs.QUICK._replace(sine_seeds=1, sine_seconds=0.0, mnist_steps=2, ablation_steps=1, train_sample=20)
    monkeypatch.setattr(runs, "QUICK", small)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["runs", *map(str, arguments), "--out", str(tmp_path / "out")])
        runs.main()
        return {str(path.relative_to(tmp_path / "out" / "logs")) for path in (tmp_path / "out").rglob("*.jsonl")}

    return call


def test_main_goes_on_after_a_failure_and_skips_what_is_done(main, monkeypatch, capsys):
    def broken(model, loss, hyper):
        raise ValueError("it is broken")

    monkeypatch.setitem(METHODS, "adam", replace(METHODS["adam"], build=broken))
    logs = main("sine", "--optimizers", "adam", "sgd", "--columns", "default")
    assert logs == {"sine/adam.default.1000.jsonl", "sine/sgd.default.1000.jsonl"}
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["sine/sgd.default.1000", "sine/adam.default.1000"]
    assert "finished at step 2" in said[0]
    assert said[1].endswith("ValueError: it is broken")
    main("sine", "--optimizers", "adam", "sgd", "--columns", "default")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["sine/adam.default.1000"]


def test_main_on_digits_with_tuned_values(main, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runs, "find", lambda name, folder: digits(name=f"{name} in {folder}"))
    tuned = tmp_path / "tuned.json"
    tuned.write_text(json.dumps({"mnist": {"sgd": {"lr": 0.5}}}))
    options = ["--optimizers", "sgd", "--tuned", tuned, "--data", "mnist-5k", "--data-dir", "here"]
    assert main("mnist", "swapped", *options) == {
        f"{experiment}/sgd.{column}.1000.jsonl"
        for experiment in ("mnist", "swapped")
        for column in ("default", "tuned")
    }
    head = lines_of(tmp_path / "out" / "logs" / "mnist" / "sgd.tuned.1000.jsonl")[0]
    assert head["hyper"]["lr"] == 0.5
    assert head["data"]["name"] == "mnist-5k in here"
    assert "test accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cosine"], "no experiment 'cosine'"),
        (["sine", "--optimizers", "sdg"], "no optimizer 'sdg'"),
        (["sine", "--columns", "best"], "no column 'best'"),
        (["sine", "--seeds", "0"], "seeds=0"),
        (["mnist", "--data", "cifar"], "cifar"),
        (["mnist", "--data", "mnist", "--data-dir", "nowhere"], "nowhere"),
        (["sine", "--tuned", "nowhere.json"], "nowhere.json"),
        (["sine", "--tuned", "broken.json"], "broken.json"),
        (["mnist", "--data", "digits"], "scikit-learn"),
    ],
)
def test_main_refuses_bad_input(main, monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # not installed
    with pytest.raises(SystemExit) as stop:
        main(*arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_main_names_the_log_that_cannot_be_written(main, tmp_path, capsys):
    with room_for(400), pytest.raises(SystemExit) as stop:  # enough for the lock
        main("sine", "--optimizers", "sgd", "--columns", "default")
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert f"error: {tmp_path / 'out/logs/sine/sgd.default.1000.jsonl'} could not be written" in said
    left = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert [(path.name, path.read_bytes()) for path in left] == [(".logs.lock", b"")]
