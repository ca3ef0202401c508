"""Installs a wheel into empty environments, with torch alone and with each extra, and runs smoke.py in them.

python tests/release/environments.py dist/marquardt-*.whl              # make dist
python tests/release/environments.py dist/marquardt-*.whl table        # these extras alone
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
import venv
from pathlib import Path

from smoke import CHECKS

ROOT = Path(__file__).parents[2]


def tried(wheel: Path, name: str, folder: Path) -> None:
    """Raises if the installation or a check fails. The constraints say which torch: a bare one may be gigabytes."""
    venv.create(folder / "env", with_pip=True)
    python = str(folder / "env" / "bin" / "python")
    extra = "" if name == "torch_alone" else f"[{name}]"
    install = [python, "-m", "pip", "install", "-q", "--no-compile", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, f"{wheel}{extra}"], check=True)
    subprocess.run([python, str(ROOT / "tests/release/smoke.py"), name], check=True, cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("extras", nargs="*", help=f"default: all of {', '.join(CHECKS)}")
    options = parser.parse_args()
    if unknown := set(options.extras) - set(CHECKS):
        parser.error(f"no checks for {', '.join(sorted(unknown))}, only for {', '.join(CHECKS)}")
    for name in options.extras or CHECKS:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            tried(options.wheel.resolve(), name, Path(folder))
        print(f"{name}: works ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
