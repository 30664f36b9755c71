"""Admits requests: fair queues with bounded concurrency per model.

`admission` issues the permits, `model_queue` is the queue of one model, `fair_queue` decides which
request is next, `service_rate` when a refused one should retry, and `fairness` measures how evenly
keys are served.
"""

from app.admission.admission import Admission, Permit

__all__ = ["Admission", "Permit"]
