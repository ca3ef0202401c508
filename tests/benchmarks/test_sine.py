"""benchmarks/sine.py: the picture of the README."""

from __future__ import annotations

import json
import math

import sine

LOG = sine.FOLDER / "sine.json"


def test_the_pictures_are_drawn_from_the_log(tmp_path):
    pictures = sine.draw(json.loads(LOG.read_text("utf-8")), tmp_path)
    assert [p.name for p in pictures] == ["sine-light.svg", "sine-dark.svg"]
    light, dark = (p.read_text("utf-8") for p in pictures)
    assert light != dark
    assert len(light) < 150_000


def test_the_rates_come_from_other_seeds_than_the_picture():
    log = json.loads(LOG.read_text("utf-8"))
    shown = {int(seed) for runs in log["courses"].values() for seed in runs}
    assert shown == set(sine.SHOWN)
    assert not shown & set(log["tried"])
    assert set(log["courses"]) == set(sine.TAKE_PART)


def test_errors_are_those_known_by_then():
    course = [[0.1, 1, 5.0], [0.2, 2, 4.0]]
    assert sine.at(0.15, [course]) == [5.0]
    assert sine.at(0.2, [course, course]) == [4.0, 4.0]
    assert sine.at(0.15, [course, [[0.3, 1, 1.0]]]) == []  # until every run has one


def test_contestants_take_turns():
    entries = [sine.Entry("LM", math.nan), sine.Entry("Adam", 0.1)]
    found = sine.in_turns(entries, 0, budget=0.05)
    assert list(found) == entries
    assert all(course[-1][0] >= 0.05 for course in found.values())  # the last look is at the end


def test_a_fit_is_looked_at_in_the_course_of_one_run():
    first, second = sine.by_steps(sine.Entry("LM", math.nan), 0, [1, 20])
    assert second[0] < first[0]
    assert len(first[1]) == len(second[1]) == 100
