"""The core depends on torch alone."""

import subprocess
import sys


def test_the_core_imports_no_trainer():
    packages = ["accelerate", "lightning", "peft", "pytorch_lightning", "transformers"]
    code = f"import sys; sys.modules.update(dict.fromkeys({packages})); import marquardt"  # importing one is an error
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
