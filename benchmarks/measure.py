"""What the benchmarks share: the machine in words, wall time, peak memory, the reference methods, tables and JSON.

Times are medians with quartiles, taken after a warm-up and with the device idle at both ends. Contestants are
interleaved: a round times each of them once, in an order that rotates, so that all see the same state of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from marquardt.paper import data as paper_data
from marquardt.paper import problems
from marquardt.paper.methods import Unavailable, peer

MIB = 2**20
PEER = "torch_levenberg_marquardt"

Step = Callable[[Tensor, Tensor], object]  # one training step on a batch; False where it took more than one trial
Batch = tuple[Tensor, Tensor]


# --- the machine ---


def machine(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Everything that a figure depends on besides the code."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "float32 products": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu memory, GiB": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "tf32 convolutions": torch.backends.cudnn.allow_tf32,
        }
    return found


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def git_commit() -> str:
    """The commit of this checkout, marked where files differ from it; "unknown" outside one."""

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        )
        return run.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


# --- time ---


@dataclass
class Timing:
    """Seconds per step, one figure for each round."""

    seconds: list[float] = field(default_factory=list)
    plain: list[bool] = field(default_factory=list)  # whether every step of the round took one solve and one trial

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def plain_share(self) -> float:
        return statistics.fmean(self.plain) if self.plain else math.nan

    @property
    def plain_median(self) -> float:
        """Of the rounds without a second trial: the same work for every method. NaN where there is none."""
        return median([s for s, plain in zip(self.seconds, self.plain, strict=True) if plain])

    @property
    def typical(self) -> float:
        """What ratios are of: the median of the plain steps, or of all where those are few and came out slower."""
        return min(self.median, self.plain_median) if any(self.plain) else self.median

    def record(self) -> dict[str, Any]:
        low, high = self.quartiles
        return {
            "median": self.median,
            "quartiles": [low, high],
            "plain_median": self.plain_median,
            "plain_share": self.plain_share,
            "typical": self.typical,
            "seconds": self.seconds,
        }


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(run: Callable[[], object], device: torch.device) -> tuple[float, Any]:
    """Seconds until the device is idle again, and what came back."""
    synchronize(device)
    started = time.perf_counter()
    result = run()
    synchronize(device)
    return time.perf_counter() - started, result


def interleave(
    contestants: dict[str, Callable[[], object]], rounds: int, device: torch.device, warmup: int = 3, block: int = 1
) -> dict[str, Timing]:
    """Every contestant once a round, `block` steps at a time between two waits for the device."""
    timings = {name: Timing() for name in contestants}
    for step in contestants.values():
        for _ in range(warmup):
            step()
    names = list(contestants)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            step = contestants[name]
            seconds, results = timed(lambda step=step: [step() for _ in range(block)], device)
            timings[name].seconds.append(seconds / block)
            timings[name].plain.append(all(result is not False for result in results))
    return timings


# --- memory ---


def release(device: torch.device) -> None:
    """Lets go of what no name holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # one for every stream that there was, CUDA graphs have their own
        torch.cuda.empty_cache()


class Peak:
    """Most bytes in tensors inside the `with` block.

    CUDA: torch.cuda.max_memory_allocated, with everything that was there before. CPU: the allocations that the profiler
    sees, from the beginning of the block; what is to count has to be built inside it, and time is not to be measured.
    """

    def __init__(self, device: torch.device, clear: bool = True) -> None:
        self.device, self.clear = device, clear  # not clear: the allocator keeps its blocks, as in the midst of a run
        self.bytes = math.nan

    def __enter__(self) -> Peak:
        if self.clear:
            release(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device.type == "cpu":
            warnings.filterwarnings("ignore", "Profiler clears events")
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.device.type == "cuda":
            synchronize(self.device)
            self.bytes = float(torch.cuda.max_memory_allocated(self.device))
        elif self.device.type == "cpu":
            self._profile.__exit__(*exception)
            events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
            held = most = 0
            for event in sorted(events, key=lambda e: e.start_ns()):
                held += event.nbytes()
                most = max(most, held)
            self.bytes = float(most)


# --- the methods compared with ---


def adam(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], lr: float) -> Step:
    """torch.optim.Adam at its fastest, the fused one."""
    opt = torch.optim.Adam(model.parameters(), lr=lr, fused=True)

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        loss(model(x), y).backward()
        opt.step()

    return step


def graphed_adam(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], lr: float, x: Tensor, y: Tensor) -> Step:
    """The same in one CUDA graph, for batches of the shape of x and y; captured here and now, weights unchanged."""
    opt = torch.optim.Adam(model.parameters(), lr=lr, fused=True, capturable=True)
    x, y = x.clone(), y.clone()  # what the graph reads
    before = [p.detach().clone() for p in model.parameters()]

    def once() -> None:
        opt.zero_grad(set_to_none=False)
        loss(model(x), y).backward()
        opt.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # as torch's documentation of CUDA graphs has it
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    with torch.no_grad():  # the graph holds these very tensors, so they are set back in place
        for p, start in zip(model.parameters(), before, strict=True):
            p.copy_(start)
        for state in opt.state.values():
            for value in state.values():
                value.zero_()

    def step(new_x: Tensor, new_y: Tensor) -> None:
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()

    step.holds = (model, opt)  # the graph knows their memory by its address only
    return step


def lm(opt: Any) -> Step:
    """A step of mq.LM; False where the full step failed, so that more than one point was tried."""

    def step(x: Tensor, y: Tensor) -> bool:
        return opt.step(x, y).rule in ("decrease", "uphill")

    return step


def find_peer(path: Path | None) -> tuple[types.ModuleType, types.ModuleType, str] | None:
    """torch-levenberg-marquardt, where there is one: its modules training and loss, and its version.

    `path` is a folder or a wheel to look in as well.
    """
    if path is not None:
        if not path.exists():
            sys.exit(f"--peers {path}: there is no such folder or wheel")
        wheels = sorted(path.glob(f"{PEER}-*.whl")) if path.is_dir() else []
        sys.path[:0] = [str(p) for p in [path, *wheels]]
    try:
        training, loss = peer("training"), peer("loss")
    except Unavailable:
        return None
    try:
        version = metadata.version("torch-levenberg-marquardt")
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    return training, loss, version


# --- data ---


def mnist_batches(data: paper_data.Digits, size: int, seed: int) -> Iterator[Batch]:
    """Endless batches in the order that `seed` gives, the same for every method."""
    device = data.train_labels.device
    for index in problems.batches(len(data.train_labels), size, seed):
        yield data.train_images[index.to(device)], data.train_labels[index.to(device)]  # (N, 1, 28, 28), (N,)


def load_mnist(directory: Path | None, device: torch.device) -> paper_data.Digits:
    try:
        return paper_data.load_mnist(directory).to(device)
    except FileNotFoundError as error:
        sys.exit(f"No MNIST, so nothing to run: {error}")


# --- tables ---


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that reads as plain text too: the first column left, the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(aligned) + " |"

    rule = [f"{'-' * (w - 1)}{'-' if i == 0 else ':'}" for i, w in enumerate(widths)]
    return "\n".join([line(head), line(rule), *(line(row) for row in rows)])


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits; – where there is nothing to show."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "never"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def milliseconds(seconds: float) -> str:
    return number(1e3 * seconds)


def span(timing: Timing) -> str:
    """The quartiles in milliseconds."""
    low, high = timing.quartiles
    return f"{milliseconds(low)} – {milliseconds(high)}"


def mib(amount: float) -> str:
    return number(amount / MIB)


@dataclass(frozen=True)
class Verdict:
    """A figure beside what it must be."""

    what: str
    value: float
    sense: str  # "≤" or "≥"; "" for a figure that is only reported
    bound: float = math.nan

    @property
    def word(self) -> str:
        if not self.sense or math.isnan(self.value):
            return ""
        return "holds" if (self.value <= self.bound if self.sense == "≤" else self.value >= self.bound) else "misses"

    def cells(self) -> list[str]:
        target = f"{self.sense} {self.bound:g}" if self.sense else ""
        return [self.what, number(self.value), target, self.word]

    def record(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "value": self.value,
            "target": [self.sense, self.bound] if self.sense else None,
            "verdict": self.word or None,
        }


def verdicts(lines: Sequence[Verdict]) -> str:
    return markdown(["figure", "value", "target", "verdict"], [line.cells() for line in lines])


# --- the command line ---


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--quick", action="store_true", help="small and few: ends in seconds, shows that everything runs")
    add("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=positive, help="CPU threads of torch (default: torch's)")
    add("--seed", type=int, default=0)
    add("--commit", metavar="TEXT", help="the commit to record where this is no git checkout")
    add("--json", type=Path, metavar="FILE", help="write all figures here")
    return made


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Prepares torch as the options say, and prints the machine."""
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    described = machine(options.device, options.commit)
    print("\n".join(f"- {key}: {value}" for key, value in described.items()), end="\n\n", flush=True)
    return described


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def write(options: argparse.Namespace, described: dict[str, Any], **content: Any) -> None:
    """JSON with the machine and the options on top, files by their names alone; None for what is not finite."""
    if options.json is None:
        return
    given = {k: v.name if isinstance(v, Path) else v for k, v in vars(options).items() if k != "setup"}
    chosen = {k: v if isinstance(v, (int, float, list, type(None))) else str(v) for k, v in given.items()}
    full = {"benchmark": Path(sys.argv[0]).stem, "machine": described, "options": chosen, **content}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(plain(full), indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def plain(value: Any) -> Any:
    """As JSON takes it."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "record"):
        return plain(value.record())
    return value


def note(text: str) -> None:
    """Progress, apart from the result."""
    print(text, file=sys.stderr, flush=True)
