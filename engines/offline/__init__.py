"""Offline inference: a batch of prompts through vLLM's `LLM`, without a server.

`Session` runs a `Job` in child processes (`worker`) and yields its events. `prompts` reads files of
prompts; `sampling` and `sampling_bounds` turn flags into checked sampling parameters.
"""

from engines.offline.job import Job
from engines.offline.prompts import Prompt, PromptsError, read_prompts
from engines.offline.sampling import SAMPLING, Kind, SamplingError, parse_sampling
from engines.offline.sampling_bounds import check_bounds
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
    "check_bounds",
    "parse_sampling",
    "read_prompts",
]
