"""The API keeps to its own OpenAPI document under requests made from it, valid and not (schemathesis)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from backend_rows import events, identity, send, serving
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ENDLESS = {"/api/v1/events/stream"}
"""Streams: they answer until the client goes."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("schemathesis")) as client:
        for rank in range(2):
            send(client, identity(rank, job="demo", world_size=2), events(6, rank=rank))
        yield str(client.base_url)


def operations(base: str) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


def trial(base: str, examples: int, every: int = 1) -> int:
    """Each ``every``-th operation with ``examples`` requests; how many operations there were."""
    chosen = [o for o in operations(base) if o.path not in ENDLESS]
    random.Random(7).shuffle(chosen)
    for operation in chosen[::every]:
        quiet = settings(
            max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip

        @seed(11)
        @quiet
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=30, headers={"host": httpx.URL(base).netloc.decode()})

        ask()
    return len(chosen)


def test_10_requests_made_from_the_document_find_no_fault(base: str) -> None:
    assert trial(base, 3, every=3) > 30


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_10_many_requests_made_from_the_document_find_no_fault(base: str) -> None:
    assert trial(base, 150) > 30
