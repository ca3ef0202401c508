"""The example for torchrun takes the same steps as one process and on two ranks, and goes on from its checkpoint."""

import re
import runpy
import sys
from pathlib import Path

import marquardt as mq
from support.ranks import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed_mnist.py"


def accuracy(steps, checkpoint=None):
    main = runpy.run_path(str(EXAMPLE))["main"]
    return main(steps, checkpoint, curvature=mq.Dense(), damping=mq.MaxDiagonal())


def resumed(folder):
    """After step 2"""
    accuracy(2, folder)
    return accuracy(3, folder)


def test_one_process_and_two_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "11"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    found = re.findall(r"step (\d+)  loss \S+  test accuracy (\S+)%", capsys.readouterr().out)
    assert [int(step) for step, _ in found] == [10, 11]
    assert float(found[1][1]) > 85
    want = accuracy(3)
    first, second = run(resumed, 2, tmp_path)
    assert first == second
    assert abs(first - want) < 0.01
    assert len(re.findall("step 3  loss", capsys.readouterr().out)) == 2  # of the one process, and of rank 0
