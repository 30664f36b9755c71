"""The audit: who did what to keys, owners, models, the configuration and sessions; append-only.

A change of the database and its record are one transaction (`write_records`); for everything else
`AuditTrail.record` comes first, and what the database does not take is in the log.
"""

from app.audit.record import UNKNOWN_ACTOR, Action, Actor, AuditRecord
from app.audit.trail import (
    AuditFilter,
    AuditPage,
    AuditTrail,
    StoredRecord,
    log_record,
    write_records,
)

__all__ = (
    "UNKNOWN_ACTOR",
    "Action",
    "Actor",
    "AuditFilter",
    "AuditPage",
    "AuditRecord",
    "AuditTrail",
    "StoredRecord",
    "log_record",
    "write_records",
)
