"""Draw the pictures of docs/gallery.md that no example draws: a curve, many curves, and a network with its uncertainty.

python docs/figures/gallery.py    # writes docs/assets/curve.svg, many.png and uncertainty.svg
"""

import torch
from style import BLUE, GREY, ORANGE, figure, save
from torch import nn

import marquardt as mq


def curve() -> None:
    """A decay with an offset, its band and the band of new observations."""
    torch.manual_seed(0)

    def decay(x, amplitude, rate, offset):
        return amplitude * torch.exp(-rate * x) + offset

    x = torch.linspace(0, 5, 60, dtype=torch.float64)
    y = decay(x, 2.5, 1.3, 0.5) + 0.1 * torch.randn(60, dtype=torch.float64)
    fit = mq.curve_fit(decay, x, y)
    fine = torch.linspace(0, 6, 200, dtype=torch.float64)

    picture = figure(7, 3.2)
    axes = picture.subplots()
    axes.fill_between(fine, *fit.prediction_band(fine), color=BLUE, alpha=0.15, label="95 % of observations")
    axes.fill_between(fine, *fit.confidence_band(fine), color=BLUE, alpha=0.4, label="95 % band of the curve")
    axes.plot(fine, fit.predict(fine), color=BLUE, label="fit")
    axes.plot(x, y, ".", color=ORANGE, label="data")
    axes.set(xlabel="x", ylabel="y")
    axes.legend()
    save(picture, "curve.svg")


def many() -> None:
    """A peak in each of 6,000 pixels: one of them, the place of the highest value, and the centre that is fitted."""
    torch.manual_seed(0)

    def peak(x, height, centre, width, base):
        return height * torch.exp(-(((x - centre) / width) ** 2) / 2) + base

    down, across = torch.meshgrid(torch.linspace(-1, 1, 60), torch.linspace(-1, 1, 100), indexing="ij")
    centre = (2 * torch.exp(-3 * (down**2 + across**2)) * torch.cos(6 * across)).double()
    x = torch.linspace(-5, 5, 40, dtype=torch.float64)
    y = peak(x, 1.0, centre.reshape(-1, 1), 1.0, 0.2) + 0.15 * torch.randn(6000, 40, dtype=torch.float64)
    top = y.max(1)
    ones = torch.ones(6000, dtype=torch.float64)
    fits = mq.curve_fit(peak, x, y, p0=torch.stack([ones, x[top.indices], ones, 0 * ones], 1), batched=True)

    picture = figure(9.5, 2.9)
    one, highest, fitted = picture.subplots(1, 3)
    one.plot(x, y[3050], ".", color=ORANGE)
    one.plot(x, peak(x, *fits.popt[3050]), color=BLUE)
    one.set(title="one of 6,000 pixels", xlabel="x")
    square = {"cmap": "RdBu", "vmin": -2, "vmax": 2, "aspect": "auto"}
    highest.imshow(x[top.indices].reshape(60, 100), **square)
    highest.set(title="place of the highest value", xticks=(), yticks=())
    image = fitted.imshow(fits.popt[:, 1].reshape(60, 100), **square)
    fitted.set(title="centre that is fitted", xticks=(), yticks=())
    picture.colorbar(image, ax=fitted)
    save(picture, "many.png")


def uncertainty() -> None:
    """A network of 151 parameters on 60 noisy points with a gap: weight decay and noise by evidence."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(30, 1) - 1.2, torch.rand(30, 1) + 0.2]).double() * 1.5
    y = torch.sin(3 * x) + 0.15 * torch.randn(60, 1).double()
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    result = mq.fit(model, (x, y), "mse", weight_decay=mq.Evidence(), progress=False)
    fine = torch.linspace(-2.5, 2.5, 200).double().unsqueeze(1)
    new = result.posterior().predict(fine)
    low, high = new.interval(0.95)

    picture = figure(7, 3.2)
    axes = picture.subplots()
    axes.fill_between(fine[:, 0], low[:, 0], high[:, 0], color=BLUE, alpha=0.2, label="95 % interval")
    axes.plot(fine, new.mean, color=BLUE, label="network")
    axes.plot(fine, torch.sin(3 * fine), "--", color=GREY, linewidth=1, label="truth")
    axes.plot(x, y, ".", color=ORANGE, label="data")
    axes.set(xlabel="x", ylabel="y", ylim=(-3, 3))
    axes.legend(ncols=4, loc="upper center", fontsize="small")
    save(picture, "uncertainty.svg")


if __name__ == "__main__":
    curve()
    many()
    uncertainty()
