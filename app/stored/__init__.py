"""Ownership of responses that engines store: the key that may read each, and its engine."""

from app.stored.responses import ResponseIdTaken, StoredResponse, StoredResponses

__all__ = ("ResponseIdTaken", "StoredResponse", "StoredResponses")
