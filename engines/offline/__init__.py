"""Offline inference: a batch of prompts through vLLM's `LLM`, without a server.

`Session` runs a `Job` in child processes (`worker`) and yields its events. `prompts` reads files of
prompts; `sampling` turns flags into sampling parameters.
"""

from engines.offline.job import Job
from engines.offline.prompts import Prompt, PromptsError, read_prompts
from engines.offline.sampling import SAMPLING, Kind, SamplingError, parse_sampling
from engines.offline.session import Advance, Finished, Loaded, Loading, OfflineError, Session

__all__ = [
    "SAMPLING",
    "Advance",
    "Finished",
    "Job",
    "Kind",
    "Loaded",
    "Loading",
    "OfflineError",
    "Prompt",
    "PromptsError",
    "SamplingError",
    "Session",
    "parse_sampling",
    "read_prompts",
]
