"""Where alerts go beside the targets of the settings; made and ended through the API."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select

from lanterne.backend.store.database import Database
from lanterne.backend.store.models import WebhookRow
from lanterne.backend.store.records import WebhookRecord


def _record(row: WebhookRow) -> WebhookRecord:
    return WebhookRecord(
        id=row.id,
        format=row.format,
        url=row.url,
        secret=row.secret,
        severities=frozenset(row.severities.split()),
        author=row.author,
        created_ns=row.created_ns,
    )


class Webhooks(Database):
    def add_webhook(
        self, form: str, url: str, *, severities: Iterable[str], secret: str = "", author: str = ""
    ) -> WebhookRecord:
        """Keep a target; its form and address have been checked."""
        row = WebhookRow(
            format=form,
            url=url,
            secret=secret,
            severities=" ".join(sorted(severities)),
            author=author[:128],
            created_ns=self.clock.unix_ns(),
        )
        with self.writing() as session:
            session.add(row)
            session.flush()
            return _record(row)

    def webhooks(self) -> list[WebhookRecord]:
        """All of them, the oldest first."""
        with self.reading() as session:
            return [_record(row) for row in session.scalars(select(WebhookRow).order_by(WebhookRow.id))]

    def end_webhook(self, number: int) -> bool:
        """Forget one; whether it was there."""
        with self.writing() as session:
            row = session.get(WebhookRow, number)
            if row is not None:
                session.delete(row)
            return row is not None
