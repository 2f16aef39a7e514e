"""The HTML report: well-formed, complete, and sufficient unto itself."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np

from scheduler_svc.core import SchedulerConfig
from scheduler_svc.simulator.charts import Axis, Series, line_chart, thinned
from scheduler_svc.simulator.report import render
from scheduler_svc.simulator.rows import Row
from scheduler_svc.simulator.simulation import ExecutorSetup
from scheduler_svc.simulator.summary import METRICS, summarise
from tests.simulator.test_simulation import SECOND, run, synthetic

VOID = {"meta", "line", "br"}
REFERENCES = {"src", "href", "xlink:href", "srcset", "action", "data", "poster"}


class Checker(HTMLParser):
    """Fails where elements do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert not checker.open
    return checker


def report(names: list[str]) -> str:
    rows = [
        Row(name, SchedulerConfig(), ExecutorSetup(blocks=512, seats=4 * i), SECOND) for i, name in enumerate(names, 1)
    ]
    recordings = [run(synthetic(30), row.setup) for row in rows]
    return render({"requests": "30"}, rows, recordings, [summarise(one, SECOND) for one in recordings])


def test_it_is_well_formed_and_holds_every_metric_setting_and_plot() -> None:
    html = report(["base", "wide"])
    checker = checked(html)
    assert checker.seen.count("figure") == 5 and checker.seen.count("polyline") == 10
    for metric in METRICS:
        assert f">{metric.title}<" in html
    assert ">discipline<" in html and ">seats<" in html
    assert "prefers-color-scheme: dark" in html


def test_it_asks_for_nothing_outside_itself() -> None:
    html = report(["base"])
    checker = checked(html)
    assert not REFERENCES & set(checker.attributes)
    assert not {"script", "link", "iframe", "img", "object"} & set(checker.seen)
    assert not re.search(r"https?:|//|url\(|@import", html)


def test_names_are_escaped() -> None:
    html = report(["<b>&", "two"])
    checked(html)
    assert "<b>" not in html and "&lt;b&gt;&amp;" in html


def test_a_chart_stays_within_its_frame_and_an_empty_one_says_so() -> None:
    x = np.linspace(0.001, 50.0, 40)
    html = line_chart("t", "x", "y", [Series("one", x, x**2), Series("none", x[:0], x[:0])], log_x=True)
    checked(html)
    (points,) = re.findall(r'points="([^"]+)"', html)
    places = np.array([[float(v) for v in point.split(",")] for point in points.split()])
    assert places.min() >= 0 and places[:, 0].max() <= 640 and places[:, 1].max() <= 260
    assert "Nothing to draw" in line_chart("t", "x", "y", [])


def test_ticks_are_round_and_within_the_axis() -> None:
    assert Axis(0, 47.0, 0, 1).ticks().tolist() == [0, 10, 20, 30, 40]
    assert Axis(0.05, 300.0, 0, 1, log=True).ticks().tolist() == [0.1, 1.0, 10.0, 100.0]
    assert replace(Axis(0, 1, 10, 20)).place(np.array([0.5])).tolist() == [15.0]


def test_thinning_keeps_the_mean() -> None:
    x = np.arange(10_007, dtype=np.float64)
    few, means = thinned(x, x * 2)
    assert len(few) == 600
    assert np.allclose(means, few * 2)
