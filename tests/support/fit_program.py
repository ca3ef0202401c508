"""A fit in a process that ends without warning after some steps: python fit_program.py FILE KIND STEP"""

from __future__ import annotations

import os
import sys

import marquardt as mq
from marquardt.training import checkpoint
from support.fits import KINDS


def main(file: str, kind: str, last: int) -> None:
    checkpoint.SECONDS = checkpoint.SHARE = 0.0  # after every step

    def kill(running: mq.training.Running) -> None:
        if running.step.step == last:
            os._exit(9)

    model, arguments = KINDS[kind]()
    mq.fit(model, loss="mse", checkpoint=file, callbacks=kill, **arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
