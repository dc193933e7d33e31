"""Alerts as a receiver sees them: a real HTTP server on a free port takes what is sent."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from receiver import Receiver

from lanterne.backend.alerts import Alert, Alerter, Target, checked_address, send, slack_body, targets_of
from lanterne.backend.sla.objectives import BurnAlert
from lanterne.backend.sla.watch import BurnWatch
from lanterne.backend.store import migrate
from lanterne.backend.store.control import ControlStore
from lanterne.clock import SimulatedClock
from lanterne.errors import LanterneError, UsageError
from lanterne.nouns import Cause, CauseCategory, Incident, IncidentStatus, Severity, Subject
from lanterne.settings import ServerSettings

OPENED = "2026-01-01T00:00:00Z"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def control(tmp_path: Path, clock: SimulatedClock) -> Iterator[ControlStore]:
    settings = ServerSettings(data=str(tmp_path))
    migrate.upgrade(settings, branch="control")
    store = ControlStore.open(settings, clock=clock)
    yield store
    store.close()


def incident(name: str = "inc-1", **more: Any) -> Incident:
    cause = Cause(category=CauseCategory.DATA_STALL, subject=Subject(rank=3, host="n1"))
    fields = {"status": IncidentStatus.DIAGNOSED, "severity": Severity.P1, "causes": (cause,), **more}
    return Incident(id=name, kind="straggler", opened_step=7, opened_at=OPENED, **fields)


def target(receiver: Receiver, form: str = "generic", **more: Any) -> Target:
    return Target(url=receiver.url, format=form, allow_private=True, **more)


def test_it_is_told_once_and_its_end_once(receiver: Receiver, control: ControlStore, clock: SimulatedClock) -> None:
    alerter = Alerter(control, [target(receiver, "alertmanager")], link="http://l", clock=clock, group_s=0.0)
    assert alerter.notify(incident(), "job", fingerprint="f", says="rank 3 waits")
    assert not alerter.notify(incident(), "job", fingerprint="f")
    assert alerter.notify(incident(severity=Severity.P0), "job", fingerprint="f")  # worse is news
    alerter.start()
    receiver.bodies(1)
    over = incident(status=IncidentStatus.RESOLVED, ledger={"verified": "2026-01-01T00:05:00Z"})
    assert alerter.notify(over, "job", fingerprint="f")
    assert not alerter.notify(over, "job", fingerprint="f")
    assert not alerter.notify(replace(over, id="inc-2"), "job")  # its opening was never told
    alerter.stop()
    first, last = receiver.bodies(2)
    assert (first["version"], first["status"], first["groupLabels"]) == ("4", "firing", {"job": "job"})
    assert first["alerts"][0]["labels"] == {
        "alertname": "lanterne_straggler", "job": "job", "severity": "P0", "incident": "inc-1", "cause": "data_stall",
        "rank": "3", "host": "n1",
    }  # fmt: skip
    assert first["alerts"][0]["generatorURL"] == "http://l/incidents/inc-1"
    assert (last["status"], last["alerts"][0]["endsAt"]) == ("resolved", "2026-01-01T00:05:00Z")
    clock.advance(5 * 3600 * 10**9)
    assert alerter.notify(incident(status=IncidentStatus.OPEN), "job")


def test_alerts_of_a_job_go_in_one_message(receiver: Receiver, control: ControlStore) -> None:
    alerter = Alerter(control, [target(receiver, "slack")], group_s=0.0)
    for i in range(60):
        alerter.notify(incident(f"inc-{i}"), "job", says="<!channel> & more")
    alerter.start()
    alerter.stop()
    (body,) = receiver.bodies(1)
    assert len(body["blocks"]) == 47
    assert "&lt;!channel&gt; &amp; more" in body["blocks"][1]["text"]["text"]
    assert "60 open" in body["text"]


def test_what_is_silenced_is_not_told(receiver: Receiver, control: ControlStore, clock: SimulatedClock) -> None:
    alerter = Alerter(control, [target(receiver)], clock=clock)
    control.add_silence("job", "f", clock.unix_ns() + 10**9)
    assert not alerter.notify(incident(), "job", fingerprint="f")
    assert alerter.notify(incident("inc-9"), "job", fingerprint="other")
    clock.advance(2 * 10**9)
    assert alerter.notify(incident(), "job", fingerprint="f")
    assert alerter.counts.silenced == 1


def test_severities_that_nobody_takes_are_left_out(receiver: Receiver, control: ControlStore) -> None:
    assert not Alerter(control, [target(receiver)]).notify(incident(severity=Severity.P2), "job")
    assert not Alerter(control, []).notify(incident(), "job")


def test_the_generic_form_is_signed(receiver: Receiver) -> None:
    send(target(receiver, secret="key"), {"a": 1})
    headers, body = receiver.got[0]
    assert headers["x-lanterne-signature"] == "sha256=" + hmac.new(b"key", body, hashlib.sha256).hexdigest()
    assert headers["host"] == receiver.url.split("/")[2]


def test_a_refused_message_is_tried_again_and_a_redirect_is_not_followed(
    receiver: Receiver, control: ControlStore
) -> None:
    receiver.answers = [503, 200]
    alerter = Alerter(control, [target(receiver)], group_s=0.0)
    alerter.notify(incident(), "job")
    alerter.start()
    assert len(receiver.bodies(2)) == 2
    alerter.stop()
    assert (alerter.counts.sent, alerter.counts.failed) == (1, 0)
    receiver.answers = [302]
    with pytest.raises(LanterneError, match="302"):
        send(target(receiver), {})
    assert len(receiver.got) == 3


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x", "http://localhost:9/x", "http://[::1]/x", "http://169.254.169.254/latest/meta-data",
        "http://10.1.2.3/", "http://192.168.0.1/", "http://0.0.0.0/", "http://[::ffff:127.0.0.1]/", "http://2130706433/",
        "http://[fe80::1]/", "http://224.0.0.1/", "http://100.64.0.1/",
    ],
)  # fmt: skip
def test_private_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not a public address"):
        checked_address(url)


@pytest.mark.parametrize(
    ("url", "form"),
    [("ftp://a/b", "slack"), ("http:///x", "slack"), ("http://u:p@a/", "slack"), ("http://a/", "teams"),
     ("file:///e", "generic")],
)  # fmt: skip
def test_other_targets_are_refused(url: str, form: str) -> None:
    with pytest.raises(UsageError):
        Target(url=url, format=form)


def test_a_public_address_passes() -> None:
    assert checked_address("https://1.1.1.1/hook") == "1.1.1.1"
    body = slack_body("j", [Alert(job="j", incident=incident(), fingerprint="f", says="x")])
    assert body["blocks"][0]["type"] == "header"


def test_an_open_incident_is_told_when_its_silence_is_over(
    receiver: Receiver, control: ControlStore, clock: SimulatedClock
) -> None:
    alerter = Alerter(control, [target(receiver)], clock=clock)
    control.add_silence("job", "f", clock.unix_ns() + 10**9)
    asked = [alerter.notify(incident(), "job", fingerprint="f") for _ in range(3)]
    clock.advance(2 * 10**9)
    asked.append(alerter.notify(incident(), "job", fingerprint="f"))
    assert (asked, alerter.counts.silenced) == ([False, False, False, True], 1)


def test_a_restarted_server_does_not_repeat_itself(receiver: Receiver, control: ControlStore) -> None:
    alerter = Alerter(control, [target(receiver)])
    alerter.remember([incident()])
    assert not alerter.notify(incident(), "job")
    assert alerter.notify(incident(severity=Severity.P0), "job")
    assert alerter.notify(incident(status=IncidentStatus.RESOLVED), "job")


def test_targets_come_from_the_settings() -> None:
    found = targets_of(ServerSettings(alerts="slack=https://a/b=c  generic=http://h:9/x", alert_secret="s"))
    assert [(t.format, t.url, t.secret, t.host) for t in found] == [
        ("slack", "https://a/b=c", "s", "a"), ("generic", "http://h:9/x", "s", "h:9"),
    ]  # fmt: skip
    for text in ("https://a/b", "pager=https://a", "slack="):
        with pytest.raises(UsageError):
            targets_of(ServerSettings(alerts=text))


def test_a_budget_that_burns_is_told_while_it_burns(
    receiver: Receiver, control: ControlStore, clock: SimulatedClock
) -> None:
    alerter = Alerter(control, [target(receiver)], link="http://l", clock=clock, group_s=0.0)
    burn = BurnAlert(objective="ettr", window_s=21600.0, burn_rate=7.5, threshold=6.0, action="page")
    ticket = BurnAlert(objective="ettr", window_s=259200.0, burn_rate=2.0, threshold=1.0, action="ticket")
    asked: list[str] = []
    answers = [[], [burn, ticket], [burn, ticket], [ticket]]

    def read(job: str) -> list[BurnAlert]:
        asked.append(job)
        return answers[min(len(asked), len(answers)) - 1]

    watch = BurnWatch(alerter, read)
    for _ in range(8):
        watch.look("job", clock.unix_ns())
        clock.advance(31 * 10**9)
    alerter.start()
    alerter.stop()
    assert len(asked) == 4  # once a minute
    (body,) = receiver.bodies(1)
    (told,) = body["alerts"]  # a ticket is P2, which this target does not take
    assert (told["status"], told["url"]) == ("resolved", "http://l/jobs/job")
    assert alerter.counts.sent == 1


def test_a_burning_budget_says_how_fast(receiver: Receiver, control: ControlStore, clock: SimulatedClock) -> None:
    alerter = Alerter(control, [target(receiver)], clock=clock, group_s=0.0)
    burn = BurnAlert(objective="ettr", window_s=21600.0, burn_rate=7.5, threshold=6.0, action="page")
    BurnWatch(alerter, lambda _: [burn]).look("job", clock.unix_ns())
    alerter.start()
    alerter.stop()
    (told,) = receiver.bodies(1)[0]["alerts"]
    assert told["status"] == "firing"
    assert told["labels"]["alertname"] == "lanterne_error_budget_burn"
    assert "7.5 times too fast over the last 6 h" in told["says"]
    silent = Alerter(control, [], clock=clock)
    BurnWatch(silent, lambda _: pytest.fail("nobody is told, so nothing is read")).look("job", clock.unix_ns())


def test_targets_set_through_the_api_outlive_the_server_and_are_told(receiver: Receiver, control: ControlStore) -> None:
    control.add_webhook("generic", receiver.url, severities=["P0", "P1"], secret="s")
    alerter = Alerter(control, (), group_s=0.01, allow_private=True)
    alerter.start()
    try:
        assert [(t.format, t.number) for t in alerter.targets] == [("generic", 1)]
        assert alerter.notify(incident(), "demo")
        assert receiver.bodies(1)[0]["alerts"]
    finally:
        alerter.stop()
    assert control.end_webhook(1)
    alerter.reload()
    assert not alerter.targets
