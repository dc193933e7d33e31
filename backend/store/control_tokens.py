"""API tokens: ``lt_<id>_<secret>``; only the SHA-256 of the secret is stored (it has 256 random bits, so no salt)."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

from sqlalchemy import select, update

from lanterne import limits
from lanterne.backend.store.database import Database
from lanterne.backend.store.models import TokenRow
from lanterne.backend.store.records import TokenRecord
from lanterne.errors import UsageError

SCOPES = ("ingest", "read", "operate", "admin")
_FORM = re.compile(r"^lt_([0-9a-f]{16})_([A-Za-z0-9_-]{43})$")
_USED_EVERY_NS = 60_000_000_000


def _record(row: TokenRow) -> TokenRecord:
    return TokenRecord(
        id=row.id,
        scopes=frozenset(row.scopes.split()),
        job=row.job,
        label=row.label,
        created_ns=row.created_ns,
        expires_ns=row.expires_ns,
        revoked_ns=row.revoked_ns,
        used_ns=row.used_ns,
    )


class Tokens(Database):
    def create_token(
        self, scopes: Iterable[str], *, job: str = "", label: str = "", expires_s: float = 0.0
    ) -> tuple[str, TokenRecord]:
        """(the token, shown once, and its record). Raises :class:`UsageError` on an unknown scope or a bad job id."""
        wanted = sorted(set(scopes))
        unknown = [s for s in wanted if s not in SCOPES]
        if unknown or not wanted:
            raise UsageError(f"scope: {', '.join(unknown) or 'none given'}; choose from {', '.join(SCOPES)}")
        if job and not re.match(limits.ID_PATTERN, job):
            raise UsageError(f"job: {job!r} is not an id ({limits.ID_PATTERN})")
        now, secret = self.clock.unix_ns(), secrets.token_urlsafe(32)
        row = TokenRow(
            id=secrets.token_hex(8),
            hash=hashlib.sha256(secret.encode()).digest(),
            scopes=" ".join(wanted),
            job=job,
            label=label[:128],
            created_ns=now,
            expires_ns=now + int(expires_s * 1e9) if expires_s > 0 else 0,
            revoked_ns=0,
            used_ns=0,
        )
        with self.writing() as session:
            session.add(row)
        return f"lt_{row.id}_{secret}", _record(row)

    def verify_token(self, token: str) -> TokenRecord | None:
        """The record of a valid token; None for a wrong, revoked or expired one."""
        match = _FORM.match(token)
        if match is None:
            return None
        with self.reading() as session:
            row = session.get(TokenRow, match.group(1))
        given = hashlib.sha256(match.group(2).encode()).digest()
        if not hmac.compare_digest(row.hash if row else bytes(32), given) or row is None:
            return None
        now = self.clock.unix_ns()
        if row.revoked_ns or (row.expires_ns and row.expires_ns <= now):
            return None
        if now - row.used_ns > _USED_EVERY_NS:
            with self.writing() as session:
                session.execute(update(TokenRow).where(TokenRow.id == row.id).values(used_ns=now))
        return _record(row)

    def revoke_token(self, token_id: str) -> bool:
        """True when a valid token was revoked by this call."""
        with self.writing() as session:
            row = session.get(TokenRow, token_id)
            if row is None or row.revoked_ns:
                return False
            row.revoked_ns = self.clock.unix_ns()
        return True

    def tokens(self) -> list[TokenRecord]:
        with self.reading() as session:
            return [_record(row) for row in session.scalars(select(TokenRow).order_by(TokenRow.created_ns))]
