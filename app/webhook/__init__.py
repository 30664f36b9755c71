"""Alerts by webhook: a message in the form that its receiver takes, signed, sent and retried.

A `Message` says what happened, for programs and for people; `Webhook` makes one attempt to deliver
it, and `pause_s` is the schedule of further ones.
"""

from app.webhook.message import Message, written_time
from app.webhook.webhook import ATTEMPT_S, MAX_ATTEMPTS, Webhook, pause_s

__all__ = ("ATTEMPT_S", "MAX_ATTEMPTS", "Message", "Webhook", "pause_s", "written_time")
