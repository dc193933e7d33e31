"""Remedies: policies as data, a pure decision, verified or taken back."""

from __future__ import annotations

from lanterne.backend.policy.book import stop
from lanterne.backend.policy.decide import Decision, History, Order, decide
from lanterne.backend.policy.model import Policy, body_of, parse, parse_text, read
from lanterne.backend.policy.outcome import verify
from lanterne.backend.policy.react import Door, defaults, policies, react
from lanterne.backend.policy.replay import replay, replay_file, replay_rules, told

__all__ = [
    "Decision",
    "Door",
    "History",
    "Order",
    "Policy",
    "body_of",
    "decide",
    "defaults",
    "parse",
    "parse_text",
    "policies",
    "react",
    "read",
    "replay",
    "replay_file",
    "replay_rules",
    "stop",
    "told",
    "verify",
]
