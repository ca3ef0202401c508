import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from support.pages import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The documentation, built once for all processes that test it."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    where, log = shared / "site", shared / "site.log"
    with FileLock(shared / "site.lock"):
        if not log.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(where)]
            environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
            run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
            log.write_text(f"{run.returncode}\n{run.stdout}{run.stderr}", encoding="utf-8")
    said = log.read_text(encoding="utf-8")
    assert said.startswith("0\n"), said
    return where
