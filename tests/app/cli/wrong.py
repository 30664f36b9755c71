"""Common configuration errors, each with the line that reports it."""

from typing import NamedTuple

from tests.fakes.vllm_flags import table

VLLM = f"vLLM {table().version}"
DEEP = "/srv/" + "deep/" * 20 + "run"


class Wrong(NamedTuple):
    """A file, and the output of `check` after `gateway.yaml`."""

    text: str
    line: str


def _engine(*lines: str, above: str = "") -> str:
    """A model with one engine, which has these further lines; they begin in line 6."""
    head = "models:\n  - name: demo\n    engines:\n      - kind: process\n        model: m\n"
    return above + head + "".join(f"        {line}\n" for line in lines)


GOOD = _engine()
WRONG = {
    "list without an end": Wrong(
        "models: [", ":1:10: expected the node content, but found '<stream end>'"
    ),
    "no mapping": Wrong("just words", ": the file must be a mapping of settings such as `models:`"),
    "nothing": Wrong("", ": models: is required"),
    "unknown section": Wrong(
        "sever: {port: 8000}\n" + GOOD, ":1: sever: unknown key; did you mean server?"
    ),
    "unknown key of an engine": Wrong(
        _engine("replica: 2"),
        ":6: model demo: engines[0].replica: unknown key; did you mean replicas?",
    ),
    "empty section": Wrong("server:\n" + GOOD, ":1: server: must be a mapping, not empty"),
    "port out of range": Wrong(
        "server: {port: 80000}\n" + GOOD, ":1: server.port: must be at most 65535, not 80000"
    ),
    "word for a number": Wrong(
        "server: {port: eight}\n" + GOOD, ":1: server.port: must be a whole number, not 'eight'"
    ),
    "no kind": Wrong(
        "models:\n  - name: demo\n    engines:\n      - model: m\n",
        ":4: model demo: engines[0].kind: is required: process, in_process, container, ray or "
        "remote",
    ),
    "unknown kind": Wrong(
        GOOD.replace("process", "proces"),
        ":4: model demo: engines[0].kind: must be process, in_process, container, ray or remote, "
        "not 'proces'; did you mean process?",
    ),
    "no engines": Wrong(
        "models:\n  - name: demo\n    engines: []\n", ":3: model demo: engines: must not be empty"
    ),
    "unknown policy": Wrong(
        GOOD + "    policy: least-loaded\n",
        ":6: model demo: policy: must be round_robin, least_loaded, prefix or session, not "
        "'least-loaded'; did you mean least_loaded?",
    ),
    "one alias without a list": Wrong(
        GOOD + "    aliases: gpt-4o\n", ":6: model demo: aliases: must be a list, not 'gpt-4o'"
    ),
    "list in env": Wrong(
        _engine("env: {OMP_NUM_THREADS: [4]}"),
        ":6: model demo: engines[0].env.OMP_NUM_THREADS: must be text, not a list",
    ),
    "key given twice": Wrong(
        _engine("args: {max-model-len: 1024}", "args: {dtype: half}"),
        ":7: models[0]: engines[0].args: given twice, first in line 6",
    ),
    "fallback with a typing error": Wrong(
        GOOD + "    fallbacks: [demo-smal]\n" + "  - {name: demo-small, "
        "engines: [{kind: process, model: m}]}\n",
        ":6: model demo: fallbacks[0]: 'demo-smal' is not a model; did you mean demo-small?",
    ),
    "URL without a scheme": Wrong(
        "models:\n  - name: demo\n    engines:\n      - kind: remote\n        url: gpu-box:8000\n",
        ":5: model demo: engines[0].url: must look like http://host:port or https://host, not "
        "'gpu-box:8000'",
    ),
    "flag with a typing error": Wrong(
        _engine("args:", "  max-modellen: 4096"),
        f":7: model demo: engines[0].args.max-modellen: {VLLM} has no such flag; did you mean "
        "max-model-len?",
    ),
    "value that a flag does not take": Wrong(
        _engine("args: {dtype: bflot16}"),
        ":6: model demo: engines[0].args.dtype: vLLM refuses it: invalid choice: 'bflot16'; did "
        "you mean bfloat16? (choose from 'auto', 'bfloat16', 'float', 'float16', 'float32', "
        "'half')",
    ),
    "unknown tool-call parser": Wrong(
        _engine("args: {enable-auto-tool-choice: true, tool-call-parser: hermess}"),
        f":6: model demo: engines[0].args.tool-call-parser: {VLLM} has no parser 'hermess'; did "
        "you mean hermes?",
    ),
    "flag that needs another": Wrong(
        _engine("args: {enable-auto-tool-choice: true}"),
        ":6: model demo: engines[0].args.enable-auto-tool-choice: vLLM refuses it: "
        "--enable-auto-tool-choice requires --tool-call-parser",
    ),
    "share above 1": Wrong(
        _engine("args: {gpu-memory-utilization: 90}"),
        ":6: model demo: engines[0].args.gpu-memory-utilization: must be above 0 and at most 1, "
        "not 90",
    ),
    "more ranks than NUMA nodes": Wrong(
        _engine("args: {tensor-parallel-size: 2}"),
        ":6: model demo: engines[0].args: needs 2 NUMA nodes (tensor-parallel-size 2), this "
        "machine has 1: on a CPU each rank is bound to a node of its own",
    ),
    "sleep mode on a CPU": Wrong(
        _engine("sleep_level: 1"),
        ":6: model demo: engines[0].sleep_level: vLLM has no sleep mode on this platform (cpu): "
        "leave it out",
    ),
    "directory too deep for a socket": Wrong(
        f"server: {{run_dir: {DEEP}}}\n" + GOOD,
        f":1: server.run_dir: the path of a socket, {DEEP}/demo-0/http.sock, has "
        f"{len(DEEP) + 17} bytes, at most 107 are possible: choose a shorter directory",
    ),
    "directory of the model": Wrong(
        GOOD.replace("model: m", "model: ./models/demo"),
        ":5: model demo: engines[0].model: model directory ./models/demo does not exist",
    ),
    "model without engines": Wrong(
        "models:\n  - name: demo\n", ":2: model demo: engines: is required"
    ),
    "split with a model that is not there": Wrong(
        GOOD + "    split: [{model: demo}, {model: dmo2}]\n",
        ":6: model demo: split[1].model: 'dmo2' is not a model; did you mean demo?",
    ),
    "adapters by a flag": Wrong(
        _engine("args: {lora-modules: [legal=/loras/legal]}"),
        ":6: model demo: engines[0].args.lora-modules: is set by the gateway; use adapters of the "
        "model",
    ),
    "adapters in the gateway's process": Wrong(
        GOOD.replace("process", "in_process") + "    adapters: [{name: a, source: a/b}]\n",
        ":4: model demo: engines[0]: adapters need another kind of engine, such as process",
    ),
    "adapter without a source": Wrong(
        GOOD + "    adapters: [{name: a}]\n",
        ":6: model demo: adapters[0].source: is needed: engines load the adapter from there",
    ),
    "adapter with the name that its server has for the model": Wrong(
        "models:\n  - name: demo\n    engines:\n      - kind: remote\n        url: http://gpu-1:8000\n"
        "        served_model_name: qwen\n    adapters:\n      - name: qwen\n",
        ":8: model demo: adapters[0].name: is the served_model_name of a server, which would "
        "answer without the adapter",
    ),
    "adapter that is not there": Wrong(
        GOOD + "    adapters: [{name: a, source: /no/a}]\n",
        ":6: model demo: adapters[0].source: adapter directory /no/a does not exist",
    ),
    "adapter with the name of a model": Wrong(
        GOOD + "    adapters: [{name: demo, source: a/b}]\n",
        ":6: model demo: adapters[0]: two models answer to the name 'demo'",
    ),
    "adapters of an engine without LoRA": Wrong(
        _engine("args: {enable-lora: false}") + "    adapters: [{name: a, source: a/b}]\n",
        ":6: model demo: engines[0].args.enable-lora: adapters of the model need it",
    ),
    "more adapters than the engine keeps": Wrong(
        _engine("args: {max-cpu-loras: 1}")
        + "    adapters: [{name: a, source: a/b}, {name: b, source: a/b}]\n",
        ":6: model demo: engines[0].args.max-cpu-loras: the model has 2 adapters, the engine keeps "
        "1: set it higher",
    ),
    "word for the number of GPUs": Wrong(
        _engine("gpus: all"),
        ":6: model demo: engines[0].gpus: must be auto, a number of GPUs or a list of indices "
        "such as [0, 1], not 'all'",
    ),
}
