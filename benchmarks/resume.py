"""`marquardt fit`, killed (−9) at random moments and run again with --resume: is it the same model, bit for bit?

    python benchmarks/resume.py                    # 20 moments, on scikit-learn's diabetes
    python benchmarks/resume.py --table digits --moments 5 --json resume.json

Each moment is a part, drawn evenly, of the time that an undisturbed run takes. A run is killed there, resumed, killed
once more after half of that time if it has not ended, and resumed again. All files but the report are compared, byte by
byte.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sklearn.datasets import load_diabetes, load_digits

TABLES = {"diabetes": load_diabetes, "digits": load_digits}
COMPARED = ("model.pt", "preprocessing.json", "predictions.csv", "metrics.json")


def command(data: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "marquardt", "fit", str(data), "--target", "target", "--out", str(out), *more]


def run(words: list[str]) -> float:
    """Seconds of a run that may end."""
    began = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return time.monotonic() - began


def killed(words: list[str], seconds: float) -> bool:
    """Whether there still was a process to kill."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True


def moment(data: Path, whole: Path, out: Path, seconds: float) -> dict[str, Any]:
    while not killed(command(data, out), seconds):  # the machine has become faster: there was nothing left to kill
        shutil.rmtree(out)
        seconds *= 0.8
    again = killed(command(data, out, "--resume"), seconds / 2)
    there = sorted(path.name for path in out.rglob("*") if path.is_file()) if out.exists() else []
    run(command(data, out, "--resume"))
    different = [name for name in COMPARED if (out / name).read_bytes() != (whole / name).read_bytes()]
    return {"seconds": seconds, "killed": 1 + again, "left": there, "different": different}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--table", choices=TABLES, default="diabetes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, whole = folder / f"{options.table}.csv", folder / "whole"
        TABLES[options.table](as_frame=True).frame.to_csv(data, index=False)
        total = run(command(data, whole))
        print(f"undisturbed: {total:.1f} s")
        found = []
        for k in range(options.moments):
            found.append(moment(data, whole, folder / str(k), draw.uniform(0, total)))
            last = found[-1]
            verdict = f"other {', '.join(last['different'])}" if last["different"] else "the same"
            print(f"{k + 1:3}  {last['seconds']:5.1f} s, killed {last['killed']} times: {verdict}", flush=True)
    same = sum(not one["different"] for one in found)
    kills = sum(one["killed"] for one in found)
    print(f"{same} of {len(found)} runs ended in the same model; {kills} processes were killed")
    if options.json:
        options.json.write_text(json.dumps({"undisturbed": total, "same": same, "moments": found}, indent=1))
    raise SystemExit(same < len(found))


if __name__ == "__main__":
    main()
