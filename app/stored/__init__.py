"""Who may read a response that an engine has stored, and which engine that is."""

from app.stored.responses import ResponseIdTaken, StoredResponse, StoredResponses

__all__ = ("ResponseIdTaken", "StoredResponse", "StoredResponses")
