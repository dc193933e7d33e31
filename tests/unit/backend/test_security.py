"""The checklist of docs/security.md, the server's lines of it. Each test names its line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from backend_rows import PROTOBUF, bodies, events, identity, send, serving

from lanterne.backend.app import create_app
from lanterne.backend.guard import HEADERS, RULES, Rate, check_bind, rule_of
from lanterne.clock import SimulatedClock
from lanterne.errors import UsageError
from lanterne.settings import ServerSettings

API = "/api/v1"
ADMIN = "the-admin-token-of-this-test-0123456789"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("security"), token=ADMIN) as client:
        for job in ("a", "b"):
            send(client, identity(job=job), events(2))
        yield client


def token(server: httpx.Client, *scopes: str, job: str = "") -> dict[str, str]:
    made = server.post(f"{API}/tokens", json={"scopes": list(scopes), "job": job})
    assert made.status_code == 201
    return {"authorization": f"Bearer {made.json()['token']}"}


def anonymous(server: httpx.Client) -> httpx.Client:
    return httpx.Client(base_url=server.base_url)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
@pytest.mark.parametrize("secret", ["", "short"])
def test_1_no_open_bind_without_a_token(tmp_path: Path, host: str, secret: str) -> None:
    settings = ServerSettings(host=host, token=secret, data=str(tmp_path))
    with pytest.raises(UsageError, match="LANTERNE_TOKEN") as refused:
        create_app(settings)
    assert refused.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []
    check_bind(ServerSettings(host=host, token="x" * 16))
    check_bind(ServerSettings(host="127.0.0.1"))


def test_2_every_route_is_closed_until_it_is_classified(server: httpx.Client) -> None:
    document = server.get("/openapi.json").json()
    public = {"/healthz", "/readyz"}
    with anonymous(server) as nobody:
        for path, methods in document["paths"].items():
            url = path.replace("{job}", "a").replace("{number}", "1").replace("{table}", "spans")
            url = url.replace("{incident}", "x").replace("{command}", "x").replace("{token}", "0" * 16)
            for method in methods:
                answer = nobody.request(method.upper(), url.replace("{name}", "x"))
                assert (answer.status_code == 200) == (path in public), (method, path)
                assert path in public or answer.status_code == 401, (method, path)
        for path in ("/", "/anything", "/_dash-update-component", "/docs", "/metrics"):
            assert nobody.get(path).status_code == 401
    assert sum(not rule.scopes for rule in RULES) == 2


@pytest.mark.parametrize(
    ("method", "path", "needs"),
    [
        ("POST", "/v1/traces", "ingest"), ("GET", "/api/v1/jobs", "read"), ("GET", "/api/v1/tokens", "admin"),
        ("POST", "/api/v1/query", "admin"), ("DELETE", "/api/v1/tokens/x", "admin"), ("GET", "/api/v1/audit", "admin"),
        ("POST", "/api/v1/jobs/a/commands", "operate"), ("PUT", "/api/v1/policies/x", "operate"),
        ("POST", "/api/v1/incidents/x/status", "operate"), ("DELETE", "/api/v1/whatever", "operate"),
        ("POST", "/api/v1/alerts/targets", "admin"), ("GET", "/page", "read"), ("POST", "/page", "read"),
    ],
)  # fmt: skip
def test_3_matrix_of_scopes_and_routes(server: httpx.Client, method: str, path: str, needs: str) -> None:
    assert rule_of(method, path).scopes == (needs,)
    allowed = {"ingest": {"ingest", "admin"}, "read": {"read", "operate", "admin"}, "operate": {"operate", "admin"}}
    for scope in ("ingest", "read", "operate", "admin"):
        answer = server.request(method, path, headers=token(server, scope))
        assert (answer.status_code == 403) == (scope not in allowed.get(needs, {"admin"})), scope


def test_3_a_token_of_one_job_touches_no_other(server: httpx.Client) -> None:
    own = token(server, "ingest", "read", "operate", job="a")
    with httpx.Client(base_url=server.base_url, headers=own) as client:
        assert client.get(f"{API}/jobs/a").status_code == 200
        assert [j["id"] for j in client.get(f"{API}/jobs").json()["items"]] == ["a"]
        for path in ("", "/ranks", "/commands", "/key", "/report", "/metrics", "/export/spans"):
            assert client.get(f"{API}/jobs/b{path}").status_code == 403, path
        order = {"action": "resume"}
        assert client.post(f"{API}/jobs/b/commands", json=order).status_code == 403
        assert client.post(f"{API}/jobs/a/commands", json=order).status_code == 201
        for job, status in (("a", 200), ("b", 403)):
            body = bodies(identity(1, job=job), events(1))["traces"]
            assert client.post("/v1/traces", content=body, headers=PROTOBUF).status_code == status
        made = server.post(f"{API}/jobs/b/commands", json=order).json()["id"]
        assert client.post(f"{API}/commands/{made}/cancel").status_code == 404
    rows = server.post(f"{API}/query", json={"sql": "SELECT DISTINCT rank FROM spans", "job": "b"}).json()["rows"]
    assert rows == [[0]]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:4318", "127.0.0.1.evil.example", ""])
def test_4_unknown_hosts_are_refused(server: httpx.Client, host: str) -> None:
    assert server.get(f"{API}/jobs", headers={"host": host}).status_code in (400, 421)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_4_other_sites_change_nothing(server: httpx.Client, method: str, headers: dict[str, str]) -> None:
    assert server.request(method, f"{API}/jobs/a/commands", headers=headers).status_code == 403
    assert "access-control-allow-origin" not in server.get(f"{API}/jobs", headers=headers).headers


def test_5_sign_in_revocation_and_rate(server: httpx.Client) -> None:
    made = server.post(f"{API}/tokens", json={"scopes": ["read"]}).json()
    with anonymous(server) as browser:
        answer = browser.post("/login", data={"token": made["token"]})
        assert answer.status_code == 303
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        assert browser.get(f"{API}/jobs").status_code == 200
        assert server.delete(f"{API}/tokens/{made['id']}").status_code == 204
    clock = SimulatedClock()
    rate = Rate(clock, per_s=0.2, burst=20)
    assert [rate.take("x") for _ in range(21)] == [True] * 20 + [False]
    clock.advance(5 * 10**9)
    assert [rate.take("x") for _ in range(2)] == [True, False]
    assert rate.take("y")


@pytest.mark.parametrize("path", ["/healthz", "/api/v1/jobs", "/api/v1/none", "/v1/traces", "/nothing", "/docs"])
def test_6_headers_on_every_answer(server: httpx.Client, path: str) -> None:
    for client in (server, anonymous(server)):
        answer = client.get(path, headers={"x-request-id": "mine-1"})
        for name, value in HEADERS:
            assert answer.headers[name.decode()] == value.decode(), name
        assert answer.headers["x-request-id"] == "mine-1"
    assert server.get(path, headers={"x-request-id": "a b\tc"}).headers["x-request-id"] != "a b\tc"


def test_9_large_bodies_of_the_api(server: httpx.Client) -> None:
    big = b'{"sql": "' + b"x" * (1 << 20) + b'"}'
    assert server.post(f"{API}/query", content=big).status_code == 413
    chunks = (b"x" * 65536 for _ in range(20))
    assert server.post(f"{API}/query", content=chunks).status_code == 413


def test_14_ad_hoc_sql_reads_our_tables_and_nothing_else(server: httpx.Client) -> None:
    def ask(sql: str) -> httpx.Response:
        return server.post(f"{API}/query", json={"sql": sql})

    answer = ask("SELECT job, count(*) AS n FROM spans GROUP BY job ORDER BY job")
    assert answer.status_code == 200, answer.text
    assert answer.json()["columns"] == ["job", "n"]
    for sql in (
        "SELECT * FROM read_text('/etc/passwd')", "SELECT * FROM '/etc/passwd'", "SELECT 1; SELECT 2",
        "DROP TABLE spans", "COPY spans TO '/tmp/x.csv'", "ATTACH '/tmp/x.db'", "INSTALL httpfs", "SET threads = 1",
        "CREATE TABLE t AS SELECT 1", "PRAGMA database_list", "SELECT * FROM glob('/*')", "SELECT * FROM none",
        "SELECT getenv('HOME')", "SELECT length(repeat('a', 2000000000))", "", "SELEC",
        "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range < b.range",
    ):  # fmt: skip
        answer = ask(sql)
        assert answer.status_code in (400, 422), (sql, answer.text)
        assert "root:" not in answer.text
    assert ask("SELECT count(*) FROM spans").status_code == 200
    assert ask("SELECT * FROM range(20000)").json()["truncated"] is True


def test_16_17_logs_have_no_secrets_and_no_forged_lines(server: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with anonymous(server) as nobody:
        answers = [
            nobody.get(f"{API}/jobs", headers={"authorization": "Bearer lt_planted_secret"}),
            server.get(f"{API}/jobs/none"),
            server.get("/metrics"),
            server.post("/v1/traces", content=b"\xff", headers=PROTOBUF),
        ]
    text = caplog.text + "".join(a.text for a in answers)
    assert "planted_secret" not in text
    assert ADMIN not in text
