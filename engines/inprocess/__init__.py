"""Engines of kind `in_process`: vLLM inside the gateway's own process.

`engine` implements the interface; `hosted` builds vLLM and undoes what it changes in its host;
`bridge` sends requests to its ASGI application.
"""

from engines.inprocess.engine import InProcessEngine

__all__ = ["InProcessEngine"]
