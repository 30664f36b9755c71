"""Where an engine that the gateway runs may fetch images, audio and video from.

A client names media by URL and vLLM fetches them, by default from anywhere: from services inside
the network and from a cloud's metadata server, too. Media in data: URLs are never fetched.
"""

from collections.abc import Sequence

FLAG = "allowed-media-domains"
# For vLLM an empty list allows every host (vllm/multimodal/media/connector.py). This one never
# resolves (RFC 2606, section 2).
NOWHERE = "media.invalid"
# A redirect would lead from a host that is allowed to any other.
ENV = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}


def flags(domains: Sequence[str]) -> list[str]:
    """Return the flags that restrict an engine to these hosts."""
    return [f"--{FLAG}", *(domains or (NOWHERE,))]
