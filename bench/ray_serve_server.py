"""Serve a model with Ray Serve LLM until SIGTERM. Runs in the environment of `ray_serve`."""

import json
import signal
import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

STORE_BYTES = 100 * 1024 * 1024


def main() -> None:
    """Entry point; the argument is a JSON object."""
    settings = json.loads(sys.argv[1])
    # As many CPUs as its actors ask for; they take turns on the machine's.
    ray.init(
        include_dashboard=False,
        num_cpus=4,
        object_store_memory=STORE_BYTES,
        _temp_dir=settings["directory"],
    )
    serve.start(http_options={"host": "127.0.0.1", "port": settings["port"]})
    config = LLMConfig(
        model_loading_config={"model_id": settings["name"], "model_source": settings["model"]},
        accelerator_type=None,
        deployment_config={"num_replicas": 1},
        placement_group_config={"bundles": [{"CPU": 1}]},
        engine_kwargs={name.replace("-", "_"): v for name, v in settings["args"].items()},
        # The plugins of this project are not in its environment.
        runtime_env={"env_vars": {**settings["env"], "VLLM_PLUGINS": ""}},
    )
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=False)
    try:
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
