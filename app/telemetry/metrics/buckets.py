"""Upper bounds of the histograms' buckets, in seconds where they have a unit."""

# A cached tokenize takes 2 ms, a long reasoning response ten minutes.
DURATION_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
# vLLM's own buckets for vllm:time_to_first_token_seconds, so that one graph can show both.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
# The gateway's own time: 50 µs as a rule, a millisecond when the event loop is busy.
OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)
# A tiny model on a warm machine loads in ten seconds, a large one from a network disk in an hour.
LOAD_BUCKETS = (0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
# vLLM's own buckets for vllm:inter_token_latency_seconds.
INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
# A replay at another replica begins within a second; a restart of the only engine takes minutes.
GAP_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 300)
# An actual time divided by the expected one.
RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2, 4)
