"""The causal graph: from the root cause to what the user saw, laid out left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lanterne.dashboard import theme
from lanterne.dashboard.words import plain

ROLES: Mapping[str, tuple[str, str]] = {
    "cause": ("#c8322b", "root cause"),
    "link": ("#9a6a00", "on the way"),
    "effect": ("#2f6fb0", "effect"),
    "ruled_out": ("#69727f", "ruled out"),
}
"""Role -> fill (white text on it has a contrast of 4.5 or more) and word."""
COLUMN, ROW = 230.0, 84.0


def role(node: Mapping[str, Any]) -> str:
    """A node's role among the four that are drawn; what is unknown counts as on the way."""
    text = plain(str(node.get("role", ""))).replace(" ", "_")
    if text in ROLES:
        return text
    if "root" in text or "cause" in text:
        return "cause"
    if "effect" in text or "symptom" in text or "victim" in text:
        return "effect"
    return "ruled_out" if "ruled" in text or "refused" in text else "link"


def layers(nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Column of every node: the longest way to it from a source. Cycles are cut where they close."""
    into: dict[str, list[str]] = {n: [] for n in nodes}
    for source, target in edges:
        if source in into and target in into and source != target:
            into[target].append(source)
    depth: dict[str, int] = {}

    def visit(node: str, seen: frozenset[str]) -> int:
        if node in depth:
            return depth[node]
        before = [visit(p, seen | {node}) for p in into[node] if p not in seen]
        depth[node] = max(before) + 1 if before else 0
        return depth[node]

    for node in nodes:
        visit(node, frozenset({node}))
    return depth


FOLD_FROM = 4


def fold(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The graph with many like effects of one node (each rank that waits) drawn as one; the table keeps them all."""
    nodes, edges = list(answer.get("nodes") or []), list(answer.get("edges") or [])
    into: dict[str, list[Mapping[str, Any]]] = {}
    for edge in edges:
        into.setdefault(str(edge["target"]), []).append(edge)
    sources = {str(e["source"]) for e in edges}
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for node in nodes:
        key = str(node["id"])
        if role(node) == "effect" and key not in sources and len(into.get(key, ())) == 1:
            alike.setdefault((str(into[key][0]["source"]), str(node.get("metric"))), []).append(node)
    gone: set[str] = set()
    for (source, metric), members in alike.items():
        if len(members) < FOLD_FROM:
            continue
        gone |= {str(n["id"]) for n in members}
        ranks = [n["rank"] for n in members if isinstance(n.get("rank"), int)]
        listed = ", ".join(str(r) for r in sorted(ranks)[:6]) + ("…" if len(ranks) > 6 else "")
        name = f"{len(members)} ranks: {plain(metric)} (ranks {listed})"
        first = into[str(members[0]["id"])][0]
        nodes.append({"id": f"folded {source} {metric}", "label": name, "role": "effect", "metric": metric})
        edges.append(
            {
                **first,
                "target": f"folded {source} {metric}",
                "says": f"{len(members)} like this one: {first.get('says', '')}",
            }
        )
    return {
        "nodes": [n for n in nodes if str(n["id"]) not in gone],
        "edges": [e for e in edges if str(e["target"]) not in gone],
    }


def elements(answer: Mapping[str, Any], most: int = 60) -> list[dict[str, Any]]:
    """Cytoscape elements of ``GET incidents/{id}/graph``: nodes with preset positions, edges with their statistics."""
    answer = fold(answer)
    nodes = answer["nodes"][:most]
    known = {str(n["id"]) for n in nodes}
    edges = [e for e in answer["edges"] if str(e["source"]) in known and str(e["target"]) in known]
    column = layers([str(n["id"]) for n in nodes], [(str(e["source"]), str(e["target"])) for e in edges])
    filled: dict[int, int] = {}
    total: dict[int, int] = {}
    for node in nodes:
        total[column[str(node["id"])]] = total.get(column[str(node["id"])], 0) + 1
    drawn: list[dict[str, Any]] = []
    for node in nodes:
        at = column[str(node["id"])]
        place = filled.get(at, 0)
        filled[at] = place + 1
        y = (place - (total[at] - 1) / 2) * ROW
        data = {"id": str(node["id"]), "label": _short(plain(str(node.get("label") or node["id"]))), "role": role(node)}
        drawn.append({"data": data, "position": {"x": at * COLUMN, "y": y}})
    for number, edge in enumerate(edges):
        drawn.append({"data": _edge(number, edge)})
    return drawn


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _edge(number: int, edge: Mapping[str, Any]) -> dict[str, Any]:
    kept = {
        k: edge[k]
        for k in ("kind", "weight", "says", "lag", "statistic", "p_value", "samples")
        if edge.get(k) is not None
    }
    refused = edge.get("refused")
    return {
        "id": f"edge-{number}",
        "source": str(edge["source"]),
        "target": str(edge["target"]),
        **kept,
        "refused": "" if not refused else ("refused" if refused is True else str(refused)),
    }


def stylesheet() -> list[dict[str, Any]]:
    """Cytoscape's style: colour and shape tell the role, so that it also reads without colour."""
    shapes = {"cause": "octagon", "link": "round-rectangle", "effect": "round-rectangle", "ruled_out": "rectangle"}
    base = {
        "label": "data(label)",
        "text-wrap": "wrap",
        "text-max-width": "158px",
        "text-valign": "center",
        "shape": "round-rectangle",
        "width": 178,
        "height": 56,
        "font-size": 12,
        "color": "#ffffff",
        "border-width": 0,
    }
    style = [{"selector": "node", "style": base}]
    for name, (fill, _) in ROLES.items():
        style.append({"selector": f'node[role = "{name}"]', "style": {"background-color": fill, "shape": shapes[name]}})
    line = theme.INK
    arrow = {
        "curve-style": "bezier",
        "target-arrow-shape": "triangle",
        "line-color": line,
        "target-arrow-color": line,
        "width": 2.5,
        "overlay-padding": 8,
    }
    style.append({"selector": "edge", "style": arrow})
    style.append({"selector": 'edge[refused != ""]', "style": {"line-style": "dashed", "opacity": 0.55}})
    style.append({"selector": "edge:selected", "style": {"line-color": theme.BLUE, "target-arrow-color": theme.BLUE}})
    return style
