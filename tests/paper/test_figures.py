"""Figures of made-up logs."""

from marquardt.paper import figures, logs
from marquardt.paper.styles import STYLES
from support import made_logs
from support.made_logs import digits, losses


def test_ablations_in_part(tmp_path):
    for experiment, steps in (("ablation-sine", losses([1, 0.5])), ("ablation-mnist", digits([0.1, 1.0]))):
        made_logs.write(tmp_path, made_logs.head(experiment, "vanilla", steps=1), steps)
    drawn = figures.draw(logs.read_all(tmp_path), tmp_path)
    assert [figure.name for figure in drawn] == ["ablation-sine", "ablation-mnist-added"]


def test_figures_are_the_same_for_the_same_logs(tmp_path):
    made_logs.write(tmp_path, made_logs.head("sine", "lm", steps=3, seconds=1.0), losses([1, 0.5, 0.2, 0.1]))
    found = logs.read_all(tmp_path)
    first, second = (figures.draw(found, tmp_path / name) for name in ("first", "second"))
    assert [a.path.read_bytes() for a in first] == [b.path.read_bytes() for b in second]


def test_every_method_has_its_own_look():
    styles = [STYLES[method] for method in made_logs.METHODS]
    assert len({(style.color, str(style.dashes)) for style in styles}) == len(styles)
