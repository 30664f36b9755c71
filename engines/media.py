"""Restricts the hosts from which a managed engine fetches images, audio and video.

A client names media by URL and vLLM fetches them, by default from any host, services inside the
network and a cloud's metadata server included. Media in data: URLs are never fetched.
"""

from collections.abc import Sequence

FLAG = "allowed-media-domains"
# An empty list allows every host (vllm/multimodal/media/connector.py). This name never resolves
# (RFC 2606, section 2).
NOWHERE = "media.invalid"
# A redirect could lead from an allowed host to any other.
ENV = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}


def flags(domains: Sequence[str]) -> list[str]:
    """Return the flags that restrict an engine to these hosts; none: only data: URLs."""
    return [f"--{FLAG}", *(domains or (NOWHERE,))]
