"""Clients of others, unmodified, against a real gateway on real vLLM: `make clients`.

Each runs what docs/clients.md shows of it, in an environment of its own, which is made from the
package index when it is first needed. None of this is part of `make test`.
"""
