"""Continues a stream at another engine, without a lost or repeated token. Pure: no I/O.

`eligibility` decides whether and how a request can go on, `answer` records what its client has.
"""

__all__: list[str] = []
