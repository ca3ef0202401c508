"""The words and numbers that runs, logs, tables, figures, the report and the command line share.

What stands here as a key is written to logs and to the names of files: logs of earlier versions are read with it.
"""

from __future__ import annotations

from pathlib import Path

# --- problems and experiments ---

PROBLEMS = ("sine", "mnist")  # "mnist" is the classification of digits, also of others than MNIST's
EXPERIMENTS = ("sine", "mnist", "ablation", "swapped")  # what can be asked for; an ablation is made on both problems
TITLES = {  # of the experiments that logs know, in the order of the report
    "sine": "Sine regression",
    "mnist": "Classification",
    "ablation-sine": "Ablation: sine",
    "ablation-mnist": "Ablation: classification",
    "swapped": "Train and test sets swapped",
}


def problem_of(experiment: str) -> str:
    return "sine" if experiment.endswith("sine") else "mnist"


# --- methods: the optimizers that are compared, and the variants of the ablation ---

COLUMNS = ("default", "tuned")  # the paper's hyper-parameters, or ours where it prints none; or those of a search

_KNOWN = {  # labels, and what they are, for the legend of the report
    "lm": ("LM (ours)", "the default of this library, mq.LM, which the paper does not have"),
    "lm-paper": ("LM (paper)", "the method of the paper, by which its claims are judged"),
    "lm-code": ("LM (authors' code)", "the same with the rule for λ and the details of the authors’ program"),
    "lm-vanilla": ("vanilla LM", "LM without the improvements of the paper"),
    "gauss-newton": ("Gauss-Newton", "LM without damping"),
    "newton": ("Newton", "damped Newton steps with the exact Hessian"),
    "bfgs": ("BFGS", "the quasi-Newton method of SciPy"),
    "lbfgs": ("L-BFGS", "the same with a short memory, from torch.optim"),
    "hessian-free": ("Hessian-free", "Gauss-Newton steps by conjugate gradients"),
    "kfac": ("KFAC", "the curvature of each layer as a Kronecker product"),
    "sgd": ("SGD", "with momentum, from torch.optim"),
    "adam": ("Adam", "from torch.optim"),
    "psgd": ("PSGD", "SGD with a learned preconditioner, from psgd-torch"),
    "tlm": ("torch-levenberg-marquardt", "the package torch-levenberg-marquardt"),
}
OPTIMIZERS = {key: label for key, (label, _) in _KNOWN.items()}
WHAT_THEY_ARE = {key: what for key, (_, what) in _KNOWN.items()}
PARTS = {  # the paper's four improvements, as tables and the report name them
    "max-diagonal": "max-diagonal damping",
    "momentum": "adaptive momentum",
    "search": "line search",
    "uphill": "uphill acceptance",
}
RULE = "gain"  # λ by the gain ratio: no part of the paper's, which prints no rule for λ, but it decides as much
_SHORT = {**PARTS, "momentum": "momentum", RULE: "gain ratio"}  # in labels, which are in the logs
REMOVED = {
    "paper": "LM (paper)",
    **{f"paper-{part}": f"without {label}" for part, label in _SHORT.items()},
    "paper+uphill": "with uphill acceptance",  # on the sine, where the paper's method has none
}
ADDED = {"vanilla": "vanilla", **{f"vanilla+{part}": f"vanilla + {label}" for part, label in _SHORT.items()}}
METHODS = (*OPTIMIZERS, *REMOVED, *ADDED)  # in the order of tables


def in_paper(part: str, problem: str) -> bool:
    """Whether the paper's method has this part on this problem."""
    return part != "uphill" or problem != "sine"


def compared(part: str, problem: str) -> tuple[str, str]:
    """The variants of the paper's method with and without this part."""
    return ("paper", f"paper-{part}") if in_paper(part, problem) else (f"paper+{part}", "paper")


# --- what is measured ---

MEASURES = {  # in the lines of a log, beside step and seconds; the sine has the first alone
    "train_loss": "training loss",
    "train_accuracy": "training accuracy",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
}
TARGET = 0.9  # the test accuracy that the paper's Table 1 waits for
TARGET_LABEL = f"{100 * TARGET:g} %"
SINE_READINGS = (100, 200)  # the steps after which tables and results.csv give the loss of the sine

# --- files ---

OUT = Path("paper-results")  # what the command line writes to by default
LOGS = "logs"  # folder in it
CONTENT = "report.json"  # what the page in it shows
TUNED = "tuned.json"  # what a search leaves in it; one comes with the package
