"""The explanation graph: a dozen typed nodes per cause, edges with their evidence, and the decay walk over it.

The walk starts at the symptom with influence 1. Crossing an edge to its cause multiplies by the edge's weight, and
every hop beyond the first by 0.97. A cause counts as reached at 0.7: with weights of 0.95 to 0.99 that allows four
hops, while 0.9 for both, as often written, would not allow two (0.9^4 = 0.656; research/causal.md sections 0.8, 6.6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx

from lanterne.causal.facts import Edge
from lanterne.causal.finding import Finding, Link
from lanterne.causal.remedies import place
from lanterne.nouns import AttributeValue

DECAY = 0.97
REACHED = 0.7


def node_id(metric: str, finding: Finding) -> str:
    """``metric@rank 3``: the same metric of two ranks is two nodes."""
    return f"{metric}@{place(finding.cause.subject)}"


def cause_id(finding: Finding) -> str:
    return node_id(finding.cause.category.value, finding)


def build(findings: Sequence[Finding], effects: Sequence[Finding] = ()) -> nx.DiGraph:
    """Graph with edges from cause to effect. ``effects`` are findings explained by others, drawn as links."""
    graph = nx.DiGraph()
    for finding in findings:
        _add(graph, finding, "cause")
    for finding in effects:
        _add(graph, finding, "link")
    return graph


def _node(graph: nx.DiGraph, key: str, role: str, label: str, rank: int | None, metric: str) -> None:
    order = ("ruled_out", "effect", "link", "cause")
    if key in graph and order.index(graph.nodes[key]["role"]) >= order.index(role):
        return
    graph.add_node(key, role=role, label=label, rank=-1 if rank is None else rank, metric=metric)


def _add(graph: nx.DiGraph, finding: Finding, role: str) -> None:
    subject = finding.cause.subject
    _node(graph, finding.symptom, "effect", finding.symptom, None, finding.symptom)
    below = finding.symptom
    for link in finding.path:
        key = node_id(link.metric, finding)
        _node(graph, key, "link", f"{link.label}, {place(subject)}", subject.rank, link.metric)
        _edge(graph, key, below, link)
        below = key
    root = cause_id(finding)
    _node(
        graph,
        root,
        role,
        f"{finding.cause.category.value}, {place(subject)}",
        subject.rank,
        finding.cause.category.value,
    )
    says = finding.cause.evidence[0].says if finding.cause.evidence else ""
    _edge(graph, root, below, Link(metric="", label="", weight=0.99, says=says, kind="structure"))
    for victim in finding.symptoms:
        key = f"{victim.kind}@{place(victim.subject)}"
        _node(graph, key, "effect", victim.says, victim.subject.rank, victim.kind)
        via = node_id(finding.path[0].metric, finding) if finding.path else root
        _edge(graph, via, key, Link(metric="", label="", weight=0.95, says=victim.says, kind="structure"))
    for link in finding.refused:
        key = node_id(link.metric, finding)
        _node(graph, key, "ruled_out", f"{link.label}, {place(subject)}", subject.rank, link.metric)
        source = node_id("compute_ms", finding)
        if source in graph and not graph.has_edge(source, key):
            _edge(graph, source, key, link)


def _edge(graph: nx.DiGraph, source: str, target: str, link: Link) -> None:
    if graph.has_edge(source, target) and graph.edges[source, target]["link"].weight >= link.weight:
        return
    graph.add_edge(source, target, link=link)


def walk(graph: nx.DiGraph, symptom: str) -> dict[str, float]:
    """Influence of every node on ``symptom``: the best product over paths upstream; refused edges carry nothing."""
    influence = {symptom: 1.0}
    frontier = [(symptom, 0)]
    while frontier:
        node, hops = frontier.pop()
        for source in graph.predecessors(node):
            link: Link = graph.edges[source, node]["link"]
            if link.refused:
                continue
            value = influence[node] * link.weight * (DECAY if hops else 1.0)
            if value > influence.get(source, 0.0) + 1e-12:
                influence[source] = value
                frontier.append((source, hops + 1))
    return influence


def export(graph: nx.DiGraph) -> tuple[Mapping[str, Mapping[str, AttributeValue]], Sequence[Edge]]:
    """Nodes and edges for a Diagnosis."""
    nodes = {key: dict(data) for key, data in graph.nodes(data=True)}
    edges = [
        Edge(
            source=source,
            target=target,
            kind=link.kind,
            weight=round(link.weight, 4),
            says=link.says,
            lag=link.lag,
            statistic=link.statistic,
            p_value=link.p_value,
            samples=link.samples,
            refused=link.refused,
        )
        for source, target, link in graph.edges(data="link")
    ]
    return nodes, edges
