"""The closed tables: categories, remedies, patterns, calibration, learned edges and the decay walk."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lanterne.causal import family_of, granger, graph
from lanterne.causal.patterns import PATTERNS, parse
from lanterne.causal.remedies import TABLE, remedy_for
from lanterne.causal.scoring import calibrated
from lanterne.nouns import CauseCategory, Subject

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("category", list(CauseCategory))
def test_every_category_has_a_remedy_a_family_and_a_section_that_agrees(category):
    remedy = remedy_for(category, Subject(rank=3))
    assert remedy.says
    assert "{" not in remedy.says
    assert family_of(category)
    page = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")
    section = page.split(f"### {category.value}\n", 1)[1].split("\n#", 1)[0]
    assert f"`{TABLE[category][0]}`" in section


def test_every_action_is_one_that_the_trainer_or_launcher_knows():
    seams = (ROOT / "docs" / "seams.md").read_text(encoding="utf-8")
    known = set(re.findall(r"[a-z_]+", seams.split("Actions (closed list")[1].split("\n\n")[0]))
    assert {action for action, _ in TABLE.values()} <= known | {"none"}


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
def test_a_pattern_is_a_chain_with_a_source(pattern):
    assert pattern.source
    assert pattern.says.endswith(".")
    assert pattern.edges[0].cause == pattern.root


def test_a_broken_pattern_says_where_and_what():
    text = (
        "patterns: [{name: x, category: gc_pause, scope: rank, says: a, source: b,"
        " metrics: [{metric: a}], edges: [{cause: a, effect: b, prior: 0.5, units: event}]}]"
    )
    with pytest.raises(ValueError, match=r"mine\.yaml: pattern x: edge a -> b"):
        parse(text, "mine.yaml")


def test_calibration_never_swaps_two_scores():
    for family in ("straggler", "numerics", "none of them"):
        line = [calibrated(family, x) for x in np.linspace(0, 1, 50)]
        assert line == sorted(line)


def test_granger_finds_the_lagged_driver_and_agrees_with_a_plain_regression():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4))
    x[2:, 1] += 0.8 * x[:-2, 0]
    tested = granger.granger_all(x, 3)
    assert tested.p_value[1, 0] < 1e-10
    assert tested.p_value[0, 1] > 0.01
    z = x - x.mean(0)
    y, own = z[3:, 1], np.column_stack([z[3 - k : -k, 1] for k in (1, 2, 3)])
    both = np.column_stack([own] + [z[3 - k : -k, 0] for k in (1, 2, 3)])
    own, both, y = own - own.mean(0), both - both.mean(0), y - y.mean()
    rss = [float(((y - m @ np.linalg.lstsq(m, y, rcond=None)[0]) ** 2).sum()) for m in (own, both)]
    assert tested.partial_r2[1, 0] == pytest.approx(1 - rss[1] / rss[0], abs=1e-4)


def test_lag_zero_is_seen_only_where_the_direction_is_known():
    rng = np.random.default_rng(1)
    cause = rng.normal(size=200)
    effect = 2 * cause + rng.normal(size=200)
    assert granger.granger_edge(cause, effect)[0] < 1e-10
    assert granger.granger_all(np.column_stack([cause, effect]), 2).p_value[1, 0] > 0.01


def test_mutual_information_of_a_gaussian_has_its_closed_form():
    rng = np.random.default_rng(2)
    x = rng.normal(size=4000)
    y = 0.6 * x + 0.8 * rng.normal(size=4000)
    assert granger.mutual_information_pair(x, y) == pytest.approx(-0.5 * np.log(1 - 0.36), abs=0.02)
    assert granger.mutual_information_pair(x, rng.normal(size=4000)) < 0.01


def test_false_discoveries_are_held_down():
    p = np.random.default_rng(3).random(2000)
    assert not granger.benjamini_hochberg(p).any()
    p[:20] = 1e-6
    assert granger.benjamini_hochberg(p)[:20].all()


def test_missing_values_and_short_series_are_refused_not_ranked():
    with pytest.raises(ValueError, match="missing values"):
        granger.granger_all(np.full((50, 2), np.nan))
    with pytest.raises(ValueError, match="too few"):
        granger.granger_all(np.zeros((8, 2)))


def test_the_walk_reaches_over_four_strong_hops_and_not_over_weak_or_refused_ones():
    import networkx as nx

    from lanterne.causal.finding import Link

    def chain(weight: float, refused: str = "") -> nx.DiGraph:
        found = nx.DiGraph()
        for i in range(4):
            link = Link(metric="", label="", weight=weight, says="", refused=refused if i == 3 else "")
            found.add_edge(f"n{i + 1}", f"n{i}", link=link)
        return found

    assert graph.walk(chain(0.97), "n0")["n4"] == pytest.approx(0.97**4 * 0.97**3)
    assert graph.walk(chain(0.97), "n0")["n4"] > graph.REACHED
    assert graph.walk(chain(0.9), "n0")["n4"] < graph.REACHED
    assert "n4" not in graph.walk(chain(0.97, "against the order"), "n0")
