"""Tables on made-up logs: every number against one worked out by hand."""

import pytest

from marquardt.paper import logs, tables
from support import made_logs
from support.made_logs import digits, losses


def row(table, *start):
    """The cells after `start`, by name of their column."""
    (found,) = [row for row in table.rows if row[: len(start)] == start]
    return dict(zip(table.header, found, strict=True))


@pytest.fixture
def mnist(tmp_path):
    """Adam on three seeds that reach 90 % after 2 steps, after 4, and never; SGD diverges; KFAC is not there."""
    seeds = [0.1, 0.5, 0.91, 0.92, 0.95], [0.1, 0.2, 0.3, 0.8, 0.93], [0.1, 0.2, 0.8, 0.85, 0.85]
    for seed, accuracies in enumerate(seeds):
        made_logs.write(tmp_path, made_logs.head("mnist", seed=seed, steps=4), digits(accuracies))
    tuned = made_logs.head("mnist", column="tuned", steps=4, hyper={"lr": 0.1, "betas": [0.9, 0.99]})
    made_logs.write(tmp_path, tuned, digits([0.1, 0.9, 0.97, 0.96, 0.94]))
    made_logs.write(tmp_path, made_logs.head("mnist", "sgd", steps=4), digits([0.1, 0.95, 0.2]), "diverged", "10×")
    made_logs.write(tmp_path, made_logs.head("mnist", "kfac", steps=4), status="unavailable", message="no kfac")
    return logs.read_all(tmp_path)


def test_table1_against_hand_computed_values(mnist):
    table = tables.table1(mnist)
    adam = row(table, "Adam", "default")
    assert adam["steps to 90 %"] == "3.0 ± 1.4 (2 of 3 seeds)"  # 2 and 4: deviation √2
    assert adam["time to 90 % (s)"] == "1.5 ± 0.707 (2 of 3 seeds)"  # half a second a step
    assert adam["accuracy after 4 steps"] == "91.00 ± 5.29 %"  # 95, 93, 85: deviation √28
    assert adam["converged"] == "2 of 3 seeds"
    assert adam["seeds"] == "3"
    tuned = row(table, "Adam", "tuned")
    assert (tuned["steps to 90 %"], tuned["accuracy after 4 steps"]) == ("1.0", "94.00 %")
    assert tuned["converged"] == "no"  # it ends three points below its best
    paper = row(table, "Adam", "in the paper")
    assert list(paper.values())[2:6] == ["0.1", "13", "yes", "96.5 % after 100 steps"]
    sgd = row(table, "SGD", "default")
    assert (sgd["steps to 90 %"], sgd["converged"]) == ("1.0", "no")
    assert sgd["accuracy after 4 steps"] == "no run got so far (0 of 1 seeds)"
    assert row(table, "KFAC", "default")["steps to 90 %"] == "unavailable"


def test_variances(mnist):
    table = tables.variances(mnist)
    assert row(table, "Adam", "default") == {
        **{"method": "Adam", "values": "default", "time to 90 % (s²)": "0.5 (2 of 3 seeds)"},
        **{"steps to 90 %": "2 (2 of 3 seeds)", "accuracy after 4 steps (points²)": "28", "seeds": "3"},
    }
    assert row(table, "Adam", "tuned")["steps to 90 %"] == "–"


def test_no_run_is_omitted(mnist):
    table = tables.endings(mnist)
    assert table.rows == (
        ("mnist", "KFAC", "default", "0", "unavailable", "0", "no kfac"),
        ("mnist", "SGD", "default", "0", "diverged", "2", "10×"),
    )


def test_runs_that_ended_early_are_marked(tmp_path):
    why = "cut off at 8 s, after step 2 of 4"
    made_logs.write(tmp_path, made_logs.head("mnist", "lm", steps=4), digits([0.1, 0.5, 0.9]), message=why)
    found = logs.read_all(tmp_path)
    assert row(tables.table1(found), "LM (ours)")["accuracy after 4 steps"] == "90.00 % †"
    assert [cells[-1] for cells in tables.endings(found).rows] == [why]


def test_hyperparameters_of_both_columns(mnist):
    table = tables.hyperparameters(mnist)
    assert row(table, "Adam", "default")["hyper-parameters"] == "lr = 0.05"
    assert row(table, "Adam", "tuned")["hyper-parameters"] == "lr = 0.1, betas = [0.9, 0.99]"


def test_sine_table_against_hand_computed_values(tmp_path):
    shape = {"steps": 200, "seconds": 10.0}
    flat = [1.0] * 100
    for seed, (at_100, at_200, late) in enumerate([(0.4, 0.04, 0.01), (0.2, 0.02, 0.01), (0.3, 0.03, 0.005)]):
        steps = losses([*flat, *[at_100] * 100, at_200], pace=0.01)  # 200 iterations in 2 s
        steps.append({"step": 900, "seconds": 9.0, "train_loss": late})
        steps.append({"step": 1100, "seconds": 11.0, "train_loss": 1e-9})  # past the 10 s
        made_logs.write(tmp_path, made_logs.head("sine", "adam", seed=seed, **shape), steps)
    for seed in range(2):
        steps = losses([*flat, *[0.1] * 100, 0.05], pace=0.05)
        made_logs.write(tmp_path, made_logs.head("sine", "lm", seed=seed, **shape), steps)
    made_logs.write(tmp_path, made_logs.head("sine", "lm", seed=2, **shape), losses([1, 11]), "diverged")
    table = tables.sine(logs.read_all(tmp_path))
    adam, lm = row(table, "Adam"), row(table, "LM (ours)")
    assert adam["after 100 iterations"] == "0.3 (0.25 to 0.35; 0.4)"
    assert adam["after 200 iterations"] == "0.03 (0.025 to 0.035; 0.04)"
    assert adam["after 10 s"] == "0.01 (0.0075 to 0.01; 0.01)"
    assert lm["after 100 iterations"] == "0.1 (0.1 to ∞; ∞)"
    assert (adam["rank after 10 s"], lm["rank after 10 s"]) == ("1 of 2", "2 of 2")
    assert "0.0033" in table.caption


def test_effects_are_paired_by_seed(tmp_path):
    ends = {"paper": [0.01, 0.1, 0.01, 0.1], "paper-momentum": [0.1, 0.1, 1.0, None], "vanilla": [1.0]}
    for method, values in ends.items():
        for seed, end in enumerate(values):
            head = made_logs.head("ablation-sine", method, seed=seed, steps=2)
            made_logs.write(tmp_path, head, losses([1, 1, end]), "finished" if end else "diverged")
    found = logs.read_all(tmp_path)
    table = tables.ablation(found, "ablation-sine")
    cells = row(table, "adaptive momentum")
    # log₁₀: 1, 0, 2 decades, and one run that diverged without it
    full, added = (f"{place}: log₁₀ MSE after 2 iterations" for place in ("in the paper's method", "added to vanilla"))
    assert cells[full] == "+1.00 ± 1.00 (mean of 3, better on 3 of 4 seeds)"
    assert cells[added] == "–"
    assert row(table, "LM (paper) against vanilla")[table.header[1]] == "+2.00 (better on 1 of 1 seeds)"
    outcomes = {verdict.claim: verdict.outcome for verdict in tables.verdicts(found)}
    assert outcomes["Adaptive momentum helps on the sine."] == "held"  # on three of four seeds
    assert "Uphill acceptance helps on the sine." not in outcomes  # the paper does not say so
    assert outcomes["Adaptive momentum helps in classification."] == "not measured"


def test_uphill_is_added_on_the_sine_and_removed_in_classification(tmp_path):
    for method, end in {"paper": 0.01, "paper+uphill": 0.1}.items():
        made_logs.write(tmp_path, made_logs.head("ablation-sine", method, steps=2), losses([1, 1, end]))
    for method, end in {"paper": 0.95, "paper-uphill": 0.91}.items():
        made_logs.write(tmp_path, made_logs.head("ablation-mnist", method, steps=2), digits([0.1, 0.8, end]))
    found = logs.read_all(tmp_path)
    sine, mnist = (tables.ablation(found, f"ablation-{problem}") for problem in ("sine", "mnist"))
    assert row(sine, "uphill acceptance")[sine.header[1]] == "-1.00 (better on 0 of 1 seeds)"
    assert row(mnist, "uphill acceptance")[mnist.header[1]] == "+4.00 (better on 1 of 1 seeds)"


def test_the_mean_of_the_last_ten_steps(tmp_path):
    accuracies = [0.1, *[0.5] * 10, *[0.9] * 5, *[0.8] * 5]
    made_logs.write(tmp_path, made_logs.head("mnist", "adam", steps=20), digits(accuracies))
    made_logs.write(tmp_path, made_logs.head("mnist", "adam", seed=1, steps=20), digits(accuracies[:15]), "diverged")
    table = tables.table1(logs.read_all(tmp_path))
    assert row(table, "Adam", "default")["mean over the last 10 steps"] == "85.00 % (1 of 2 seeds)"


def test_the_mnist_ablation_counts_accuracy_and_steps(tmp_path):
    for method, accuracies in {"paper": [0.1, 0.9, 0.95], "paper-search": [0.1, 0.8, 0.91]}.items():
        made_logs.write(tmp_path, made_logs.head("ablation-mnist", method, steps=2), digits(accuracies))
    table = tables.ablation(logs.read_all(tmp_path), "ablation-mnist")
    assert row(table, "line search")[table.header[1]] == "+4.00 (better on 1 of 1 seeds)"
    assert row(table, "line search")[table.header[2]] == "+1.00 (better on 1 of 1 seeds)"


def test_markdown_is_escaped():
    table = tables.Table("t", "T", ("a", "b"), (("x|y", "two\nlines"),), "c")
    assert table.markdown() == "## T\n\n| a | b |\n| --- | --- |\n| x\\|y | two lines |\n\nc\n"
