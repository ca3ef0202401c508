"""Fit a decay with an offset to noisy data, and draw the fit, its bands and the residuals.

python examples/curve_fit.py            # shows the figure
python examples/curve_fit.py fit.png    # writes it
"""

import sys

import matplotlib.pyplot as plt
import torch

from marquardt import curve_fit


def decay(x, amplitude, rate, offset):
    return amplitude * torch.exp(-rate * x) + offset


torch.manual_seed(0)
x = torch.linspace(0, 5, 60, dtype=torch.float64)
y = decay(x, 2.5, 1.3, 0.5) + 0.1 * torch.randn(60, dtype=torch.float64)

fit = curve_fit(decay, x, y, p0=[1.0, 1.0, 0.0], verbose=1)
for name, value, error in zip(("amplitude", "rate", "offset"), fit.popt.tolist(), fit.perr.tolist(), strict=True):
    print(f"{name:>9} = {value:.3f} ± {error:.3f}")

fine = torch.linspace(0, 6, 300, dtype=torch.float64)
figure, (above, below) = plt.subplots(2, 1, sharex=True, height_ratios=(3, 1), figsize=(7, 5), layout="constrained")
above.fill_between(fine, *fit.prediction_band(fine), color="C0", alpha=0.12, label="95 % of observations")
above.fill_between(fine, *fit.confidence_band(fine), color="C0", alpha=0.35, label="95 % band of the curve")
above.plot(fine, fit.predict(fine), color="C0", label="fit")
above.plot(x, y, "k.", label="data")
above.set_ylabel("y")
above.legend()
below.axhline(0, color="C0")
below.vlines(x, 0, y - fit.predict(x), color="0.7")
below.plot(x, y - fit.predict(x), "k.")
below.set_ylabel("residual")
below.set_xlabel("x")
if len(sys.argv) > 1:
    figure.savefig(sys.argv[1], dpi=150)
else:
    plt.show()
