"""What the gateway reads of an engine on real vLLM: from its log, and from its answers."""

import re

from tests.e2e.deployment import ADMIN_KEY, ENGINE, MODEL, Deployment

# Of a CPU, without compilation: vLLM prints no more.
UNKNOWN = {
    "attention_backend", "compile_s", "graph_capture_gib", "graph_capture_s", "quantization",
    "weights_gib",
}  # fmt: skip


def test_facts_of_a_start_are_read(gateway: Deployment) -> None:
    with gateway.client(ADMIN_KEY) as client, gateway.engine() as direct:
        rows = client.get("/admin/engines").json()["data"]
        version = direct.get("/version").json()["version"]
        log = client.get("/admin/engines/demo-0/log", params={"lines": 10_000}).text
    facts = next(row["facts"] for row in rows if row["name"] == "demo-0")
    known = {
        "version": version,
        "model": str(MODEL),
        "architecture": "Qwen2ForCausalLM",
        "dtype": "bfloat16",
        "max_model_len": ENGINE["args"]["max-model-len"],
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "kv_cache_gib": 0.25,
        "sampling_defaults": {"temperature": 0.0},
        "chat_template_format": "openai",
        "supported_tasks": ["generate"],
    }
    # As vLLM prints them: a page cache and a fast processor load the demo model in "0.00 seconds".
    printed = {
        "weights_load_s": r"Loading weights took ([\d.]+) seconds",
        "init_s": r"init engine \(.*?\) took ([\d.]+) s",
        "kv_cache_tokens": r"KV cache size: ([\d,]+) tokens",
        "max_concurrency": r"per request: ([\d.]+)x",
    }
    found = {name: re.findall(pattern, log)[-1] for name, pattern in printed.items()}
    assert {name: facts[name] for name in known} == known
    assert {name: facts[name] for name in found} == {
        name: float(value.replace(",", "")) for name, value in found.items()
    }
    assert facts["kv_cache_tokens"] > 0
    assert facts["max_concurrency"] > 0
    assert {name for name, value in facts.items() if value is None} <= UNKNOWN
