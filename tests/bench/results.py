"""Results as a run of the load client returns them, without a run."""

from typing import Any

import msgspec

from bench.disturbances import Disturbance
from bench.load import Result
from bench.peers import GATEWAY
from bench.samples import Sample, Samples

NOTHING = Result(
    ok=1,
    failed=0,
    failures={},
    wall_s=1.0,
    requests_per_s=1.0,
    tokens_per_s=1.0,
    chunks=1,
    ttft_p50=None,
    ttft_p99=None,
    gap_p50=None,
    gap_p99=None,
    e2e_p50=None,
    e2e_p99=None,
    stall_free=0,
    cpu_s=None,
    cpu_us_per_request=None,
    cpu_us_per_chunk=None,
    rss_mib=None,
)


def result(**fields: Any) -> Result:
    """Return a result with these figures."""
    return msgspec.structs.replace(NOTHING, **fields)


def samples(part: str, size: int, figure: str, **by_target: list[Any]) -> list[Sample]:
    """Return samples of one figure, one for each round; `_` stands for a dash in a target."""
    return [
        Sample(part, size, number, target.replace("_", "-"), result(**{figure: value}))
        for target, values in by_target.items()
        for number, value in enumerate(values)
    ]


def of(*groups: list[Sample]) -> Samples:
    """Return groups of samples as one run."""
    return Samples(sample for group in groups for sample in group)


def disturbance(**fields: Any) -> Disturbance:
    """Return one send of a hostile body with these figures."""
    return Disturbance(
        **{
            "body": "members",
            "target": GATEWAY,
            "at_once": 1,
            "round": 0,
            "outcomes": ["200"],
            "before_body": None,
            "seconds": 1.0,
            "gap_ms": 25.0,
            "wait_ms": 6.0,
            "stop_ms": 5.0,
            "rss_growth_mib": 1.0,
            **fields,
        }
    )
