"""What the gateway reads of an engine on real vLLM: from its log, and from its answers."""

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
    measured = {"weights_load_s", "init_s", "kv_cache_tokens", "max_concurrency"}
    assert {name: facts[name] for name in known} == known
    assert all(facts[name] > 0 for name in measured)
    assert {name for name, value in facts.items() if value is None} <= UNKNOWN
