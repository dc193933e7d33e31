"""Alerts about incidents: Alertmanager v4, Slack or a signed webhook; grouped, deduplicated, silenced, resolved.

``Alerter.notify(incident, job)`` queues and returns at once; one daemon thread sends. An incident is announced once for
each (id, state, severity, first cause); alerts that come within ``GROUP_S`` go out in one message a job. What was
silenced (control store, by fingerprint) is not announced and not resolved. Targets are the operator's, but what an
operator pastes may be a trap as well: only http(s), no address of loopback, link or private networks unless allowed,
the address that was checked is the one that is used, and redirects are not followed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from lanterne.backend.store.control import ControlStore
from lanterne.clock import Clock, SystemClock
from lanterne.errors import LanterneError, UsageError
from lanterne.nouns import Incident, IncidentStatus
from lanterne.settings import ServerSettings

log = logging.getLogger(__name__)

FORMATS = ("alertmanager", "slack", "generic")
GROUP_S = 2.0
REPEAT_S = 4 * 3600.0
"""An incident still open after this long is told again (Alertmanager's default repeat_interval)."""
TIMEOUT_S = 5.0
TRIES = 3
QUEUE_MAX = 1_000
TEXT_MAX = 600
BURN = "error_budget_burn"
"""Kind of an alert about a job's service levels, which is no incident: it leads to the job's page."""
OVER = frozenset({IncidentStatus.RESOLVED, IncidentStatus.DISMISSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where alerts go. ``secret`` signs the generic form (header ``x-lanterne-signature: sha256=<hex of HMAC>``)."""

    url: str
    format: str = "generic"
    secret: str = ""
    allow_private: bool = False
    severities: frozenset[str] = frozenset({"P0", "P1"})
    number: int = 0
    """Of a target that was set through the API; 0 = one of the settings."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"alerts: format {self.format!r} is not one of {', '.join(FORMATS)}")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise UsageError(f"alerts: {self.url[:80]!r} is not an http(s) address without a user name")

    @property
    def host(self) -> str:
        """Host and port; the rest of the address may be a secret (Slack's is)."""
        return urlsplit(self.url).netloc


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One incident as the outside sees it."""

    job: str
    incident: Incident
    fingerprint: str
    says: str

    @property
    def resolved(self) -> bool:
        return self.incident.status in OVER

    @property
    def labels(self) -> dict[str, str]:
        """Labels in the Prometheus sense: few values each, equal when it is the same alert."""
        first = self.incident.causes[0] if self.incident.causes else None
        found = {
            "alertname": f"lanterne_{self.incident.kind}", "job": self.job, "severity": str(self.incident.severity),
            "incident": self.incident.id,
        }  # fmt: skip
        if first is not None:
            found["cause"] = str(first.category)
            for name in ("rank", "host"):
                value = getattr(first.subject, name)
                if value is not None:
                    found[name] = str(value)
        return found


# --- bodies ----------------------------------------------------------------------------------------


def alertmanager_body(job: str, alerts: Sequence[Alert], link: str = "") -> dict[str, Any]:
    """The webhook body of Alertmanager, version 4 (Prometheus documentation, "webhook_config")."""
    common = [set(a.labels.items()) for a in alerts]
    shared = dict(sorted(set.intersection(*common))) if common else {}
    return {
        "version": "4", "groupKey": f"{{}}:{{job={json.dumps(job)}}}", "truncatedAlerts": 0, "receiver": "lanterne",
        "status": "resolved" if all(a.resolved for a in alerts) else "firing", "groupLabels": {"job": job},
        "commonLabels": shared, "commonAnnotations": {}, "externalURL": link,
        "alerts": [
            {
                "status": "resolved" if a.resolved else "firing", "labels": a.labels,
                "annotations": {"summary": a.says[:TEXT_MAX]},
                "startsAt": a.incident.opened_at or "0001-01-01T00:00:00Z",
                "endsAt": a.incident.ledger.get("verified", "0001-01-01T00:00:00Z") if a.resolved
                else "0001-01-01T00:00:00Z",
                "generatorURL": _page(link, a), "fingerprint": a.fingerprint,
            }
            for a in alerts
        ],
    }  # fmt: skip


def slack_body(job: str, alerts: Sequence[Alert], link: str = "") -> dict[str, Any]:
    """Slack's Block Kit: a header, a section an alert (at most 45 of the 50 blocks allowed), plain fallback text."""
    firing = sum(not a.resolved for a in alerts)
    head = f"{job[:100]}: {firing} open, {len(alerts) - firing} over"
    blocks: list[dict[str, Any]] = [{"type": "header", "text": {"type": "plain_text", "text": head[:150]}}]
    for a in alerts[:45]:
        mark = ":white_check_mark:" if a.resolved else ":red_circle:"
        text = f"{mark} *{a.incident.severity} {_escaped(a.incident.kind)}* {_escaped(a.says[:TEXT_MAX])}"
        page = _page(link, a)
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": f"{text}\n<{page}>" if page else text}})
    if len(alerts) > 45:
        blocks.append({"type": "context", "elements": [{"type": "plain_text", "text": f"and {len(alerts) - 45} more"}]})
    return {"text": head, "blocks": blocks}


def generic_body(job: str, alerts: Sequence[Alert], link: str = "") -> dict[str, Any]:
    """Our own form: schema ``lanterne.alert/1``."""
    rows = [
        {
            "status": "resolved" if a.resolved else "firing", "labels": a.labels, "fingerprint": a.fingerprint,
            "says": a.says[:TEXT_MAX], "opened_at": a.incident.opened_at, "url": _page(link, a),
        }
        for a in alerts
    ]  # fmt: skip
    return {"schema": "lanterne.alert/1", "job": job, "alerts": rows}


def _page(link: str, alert: Alert) -> str:
    about = f"jobs/{quote(alert.job)}" if alert.incident.kind == BURN else f"incidents/{alert.incident.id}"
    return f"{link.rstrip('/')}/{about}" if link else ""


def _escaped(text: str) -> str:
    """Slack's control characters, so that text from a job cannot mention anybody or forge a link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


BODIES: Mapping[str, Callable[[str, Sequence[Alert], str], dict[str, Any]]] = {
    "alertmanager": alertmanager_body, "slack": slack_body, "generic": generic_body,
}  # fmt: skip


# --- sending ---------------------------------------------------------------------------------------


def checked_address(url: str, *, allow_private: bool = False) -> str:
    """The IP address that ``url`` may be reached at. Raises :class:`UsageError` when any of them is not public.

    All addresses of the name must pass; with ``allow_private`` only unspecified and multicast ones are refused.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = sorted({str(row[4][0]) for row in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except OSError as error:
        raise LanterneError(f"alerts: {host[:80]} cannot be resolved: {error}") from error
    for text in found:
        address = ipaddress.ip_address(text.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        if mapped.is_unspecified or mapped.is_multicast or not (allow_private or mapped.is_global):
            raise UsageError(f"alerts: {host[:80]} leads to {text}, which is not a public address; allow it by name")
    return found[0]


def send(target: Target, body: Mapping[str, Any]) -> None:
    """POST one message. Raises :class:`LanterneError` when it was not taken (any answer but 2xx)."""
    parts = urlsplit(target.url)
    address = checked_address(target.url, allow_private=target.allow_private)
    literal = f"[{address}]" if ":" in address else address
    netloc = literal if parts.port is None else f"{literal}:{parts.port}"
    payload = json.dumps(body, separators=(",", ":")).encode()
    headers = {"content-type": "application/json", "host": parts.netloc, "user-agent": "lanterne"}
    if target.secret:
        digest = hmac.new(target.secret.encode(), payload, hashlib.sha256).hexdigest()
        headers["x-lanterne-signature"] = f"sha256={digest}"
    try:
        with httpx.Client(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client:
            answer = client.post(
                parts._replace(netloc=netloc).geturl(), content=payload, headers=headers,
                extensions={"sni_hostname": parts.hostname},
            )  # fmt: skip
    except httpx.HTTPError as error:
        raise LanterneError(f"alerts: {parts.hostname}: {type(error).__name__}: {error}") from error
    if not answer.is_success:
        raise LanterneError(f"alerts: {parts.hostname} answered {answer.status_code}")


def _key(incident: Incident) -> tuple[str, ...]:
    """What makes it news: that it is over, or its severity and first cause."""
    if incident.status in OVER:
        return ("over",)
    return ("open", str(incident.severity), str(incident.causes[0].category) if incident.causes else "")


def targets_of(settings: ServerSettings) -> tuple[Target, ...]:
    """The targets of ``LANTERNE_ALERTS``: ``form=address`` entries, spaces between. Raises :class:`UsageError`."""
    found = []
    for entry in settings.alerts.split():
        form, sign, url = entry.partition("=")
        if not sign:
            raise UsageError(f"alerts: {entry[:80]!r} is not FORM=ADDRESS, for example slack=https://hooks.slack.com/…")
        found.append(Target(url=url, format=form, secret=settings.alert_secret, allow_private=settings.alert_private))
    return tuple(found)


@dataclass(slots=True)
class _Told:
    key: tuple[str, ...]
    at_ns: int


@dataclass(slots=True)
class Counts:
    """What became of alerts; for ``/metrics``."""

    sent: int = 0
    failed: int = 0
    silenced: int = 0
    dropped: int = 0
    errors: list[str] = field(default_factory=list)  # the last few, for people


class Alerter:
    """Announces incidents to all targets. ``start`` it with the server, ``stop`` it at the end."""

    def __init__(
        self, control: ControlStore, targets: Sequence[Target], *, link: str = "", clock: Clock | None = None,
        group_s: float = GROUP_S, allow_private: bool = False,
    ) -> None:  # fmt: skip
        self.control, self.link, self.group_s = control, link, group_s
        self.fixed, self.allow_private = tuple(targets), allow_private
        self.targets: tuple[Target, ...] = self.fixed
        self.clock: Clock = clock or SystemClock()
        self.counts = Counts()
        self._told: dict[str, _Told] = {}
        self._silenced: dict[str, tuple[str, ...]] = {}
        self._queue: queue.Queue[Alert] = queue.Queue(QUEUE_MAX)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def reload(self) -> None:
        """Take the targets that were set through the API beside the fixed ones of the settings."""
        own = [
            Target(
                url=w.url, format=w.format, secret=w.secret, allow_private=self.allow_private, severities=w.severities,
                number=w.id,
            )
            for w in self.control.webhooks()
        ]  # fmt: skip
        self.targets = (*self.fixed, *own)

    def start(self) -> None:
        self.reload()
        self._thread = threading.Thread(target=self._run, name="lanterne-alerts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send what waits and end; at most a few seconds. Safe to call twice."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join(timeout=2 * TIMEOUT_S)
            self._thread = None

    def remember(self, incidents: Iterable[Incident]) -> None:
        """Incidents that an earlier life of the server has told already: they are news again only when they change."""
        for incident in incidents:
            self._told.setdefault(incident.id, _Told(_key(incident), self.clock.unix_ns()))

    def notify(self, incident: Incident, job: str, *, fingerprint: str = "", says: str = "") -> bool:
        """Queue an alert when there is something new to tell; whether it was queued. Never blocks on the network.

        Only incidents with a severity that a target takes count; a resolution is told only when the opening was. May be
        asked again and again: an incident that is silenced is told when the silence is over.
        """
        if not any(str(incident.severity) in t.severities for t in self.targets):
            return False
        first = str(incident.causes[0].category) if incident.causes else ""
        over, key = incident.status in OVER, _key(incident)
        told, now = self._told.get(incident.id), self.clock.unix_ns()
        if (told is None and over) or (told is not None and told.key == key and not self._again(told, over, now)):
            return False
        fingerprint = fingerprint or incident.id
        if any(s.fingerprint == fingerprint for s in self.control.silences(job)):
            self.counts.silenced += self._silenced.get(incident.id) != key
            self._silenced[incident.id] = key
            return False
        try:
            self._queue.put_nowait(Alert(job=job, incident=incident, fingerprint=fingerprint, says=says or first))
        except queue.Full:
            self.counts.dropped += 1
            return False
        self._told[incident.id] = _Told(key, now)
        self._silenced.pop(incident.id, None)
        for remembered in (self._told, self._silenced):
            while len(remembered) > 10 * QUEUE_MAX:
                remembered.pop(next(iter(remembered)))
        return True

    @staticmethod
    def _again(told: _Told, over: bool, now_ns: int) -> bool:
        return not over and now_ns - told.at_ns >= REPEAT_S * 1e9

    def _run(self) -> None:
        while not (self._stopping.is_set() and self._queue.empty()):
            try:
                first = self._queue.get(timeout=0.2)
            except queue.Empty:
                continue
            self._stopping.wait(self.group_s)  # let what belongs together come together
            waiting = [first]
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            self._flush(waiting)

    def _flush(self, alerts: Sequence[Alert]) -> None:
        """One message a job and target; of an incident only its newest state."""
        jobs: dict[str, dict[str, Alert]] = {}
        for a in alerts:
            jobs.setdefault(a.job, {})[a.incident.id] = a
        for job, by_id in jobs.items():
            for target in self.targets:
                wanted = [a for a in by_id.values() if str(a.incident.severity) in target.severities]
                if wanted:
                    self._deliver(target, BODIES[target.format](job, wanted, self.link))

    def _deliver(self, target: Target, body: Mapping[str, Any]) -> None:
        for attempt in range(TRIES):
            try:
                send(target, body)
                self.counts.sent += 1
                return
            except UsageError as error:
                self._failed(error)
                return
            except LanterneError as error:
                if attempt == TRIES - 1 or self._stopping.wait(0.5 * 2**attempt):
                    self._failed(error)
                    return

    def _failed(self, error: Exception) -> None:
        self.counts.failed += 1
        self.counts.errors = [*self.counts.errors[-9:], str(error)]
        log.warning("%s", error)
