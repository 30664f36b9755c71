"""Engine specifications: validation, and the command line that results."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.settings import RaySettings
from engines.spec import RESERVED_FLAGS, ProcessSpec, RaySpec, RemoteSpec
from tests.app.configuration import (
    OTHER,
    dump,
    faults,
    isolate,
    load,
    process,
    with_engine,
    with_remote,
)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


class TestFlags:
    @pytest.mark.parametrize("flag", sorted(RESERVED_FLAGS))
    def test_reserved_flag_is_refused_in_every_spelling(self, flag: str) -> None:
        for spelled in (flag, f"--{flag}", flag.replace("-", "_"), f"__{flag}"):
            with pytest.raises(ValidationError, match="is set by the gateway"):
                process({spelled: "x"})

    @pytest.mark.parametrize(
        "flag", ["served-model-name", "host", "port", "uds", "api-key", "root-path", "config"]
    )
    def test_flags_that_decide_who_reaches_an_engine_are_reserved(self, flag: str) -> None:
        assert flag in RESERVED_FLAGS

    def test_reserved_flag_in_the_file_is_a_one_line_error(self) -> None:
        line = faults(with_engine(args={"served_model_name": "x"}))[0]
        assert line == "model demo: engines[0].args.served-model-name: is set by the gateway"

    @pytest.mark.parametrize(
        "name", ["api-k", "served-model", "allowed-media", "api-key.x", "uds.0"]
    )
    def test_abbreviation_or_member_of_a_reserved_flag_is_refused(self, name: str) -> None:
        """vLLM's parser reads each as the flag itself."""
        with pytest.raises(ValidationError, match="is set by the gateway"):
            process({name: "x"})

    def test_media_domains_in_args_are_refused_with_the_setting_to_use(self) -> None:
        line = faults(with_engine(args={"allowed-media-domains": ["a.org"]}))[0]
        assert line == (
            "model demo: engines[0].args.allowed-media-domains: is set by the gateway; use "
            "media.domains of the model"
        )

    def test_local_media_path_may_be_set(self) -> None:
        assert process({"allowed-local-media-path": "/srv"}).args

    @pytest.mark.parametrize("name", ["", "--", "a b", "1x", "a=b", "x\n--host", "é", "a;b"])
    def test_invalid_flag_name_is_refused(self, name: str) -> None:
        with pytest.raises(ValidationError, match="is not the name of a flag"):
            process({name: 1})

    @pytest.mark.parametrize(
        ("args", "argv"),
        [
            ({}, []),
            ({"max-model-len": 1024}, ["--max-model-len=1024"]),
            ({"max_model_len": 1024}, ["--max-model-len=1024"]),
            ({"--max-model-len": 1024}, ["--max-model-len=1024"]),
            ({"gpu-memory-utilization": 0.9}, ["--gpu-memory-utilization=0.9"]),
            ({"dtype": "bfloat16"}, ["--dtype=bfloat16"]),
            ({"dtype": ""}, ["--dtype="]),
            ({"enforce-eager": True}, ["--enforce-eager"]),
            ({"enable-prefix-caching": False}, ["--no-enable-prefix-caching"]),
            ({"seed": None}, []),
            ({"seed": 0}, ["--seed=0"]),
            ({"seed": 1}, ["--seed=1"]),
            ({"seed": -1}, ["--seed=-1"]),
            ({"chat-template": "--host"}, ["--chat-template=--host"]),
            ({"chat-template": "a b\nc"}, ["--chat-template=a b\nc"]),
            ({"lora-target-modules": ["a=b", "c=d"]}, ["--lora-target-modules", "a=b", "c=d"]),
            ({"cuda-graph-sizes": [1, 2]}, ["--cuda-graph-sizes", "1", "2"]),
            ({"a": 1, "b": 2}, ["--a=1", "--b=2"]),
        ],
    )
    def test_args_become_flags_of_vllm_serve(self, args: dict[str, Any], argv: list[str]) -> None:
        assert process(args).argv() == argv

    def test_mapping_becomes_one_json_word(self) -> None:
        config = {"method": "ngram", "num_speculative_tokens": 4, "é": None, "on": True}
        flag, word = process({"speculative-config": config}).argv()
        assert flag == "--speculative-config"
        assert json.loads(word) == config

    @pytest.mark.parametrize("values", [["--host", "0.0.0.0"], ["a", "-b"]])
    def test_list_item_never_becomes_a_flag(self, values: list[str]) -> None:
        """An item with a leading dash ends a list in argparse: `args` could set a reserved flag."""
        try:
            argv = process({"lora-target-modules": values}).argv()
        except ValidationError:
            return
        assert [word for word in argv if word.startswith("-")] == ["--lora-target-modules"]

    @pytest.mark.slow
    @given(
        st.dictionaries(
            st.from_regex(r"[a-z]{3,8}(-[a-z]{3,8})?", fullmatch=True).filter(
                lambda name: not any(flag.startswith(name) for flag in RESERVED_FLAGS)
            ),
            st.none() | st.booleans() | st.integers() | st.text(),
            max_size=4,
        )
    )
    @settings(max_examples=100, deadline=None)
    def test_scalar_never_adds_another_flag(self, args: dict[str, Any]) -> None:
        argv = process(args).argv()
        names = [word.partition("=")[0] for word in argv]
        assert names == [
            f"--no-{name}" if value is False else f"--{name}"
            for name, value in args.items()
            if value is not None
        ]

    @pytest.mark.parametrize("name", ["", "A=B", "A\0"])
    def test_invalid_variable_name_is_refused(self, name: str) -> None:
        assert faults(with_engine(env={name: "x"}))[0].startswith("model demo: engines[0].env")

    @pytest.mark.parametrize("replicas", [0, 65, -1])
    def test_replicas_are_bounded(self, replicas: int) -> None:
        found = faults(with_engine(replicas=replicas))
        assert found[0].startswith("model demo: engines[0].replicas: ")

    @pytest.mark.parametrize("seconds", [0, -1, ".nan"])
    def test_timeout_must_be_above_zero(self, seconds: object) -> None:
        text = (
            "models: [{name: a, engines: [{kind: process, model: m, "
            f"timeouts: {{stall_s: {seconds}}}}}]}}]"
        )
        assert faults(text)[0].startswith(
            "model a: engines[0].timeouts.stall_s: must be above 0, not "
        )


class TestAddedFlags:
    DETAILS = "--enable-prompt-tokens-details"

    def test_defaults_report_cached_tokens_and_fetch_no_media(self) -> None:
        assert process({}).added_flags(()) == [
            "--allowed-media-domains",
            "media.invalid",
            self.DETAILS,
        ]

    def test_media_domains_become_a_flag(self) -> None:
        added = process({}).added_flags(("a.org", "b.org"))
        assert added == ["--allowed-media-domains", "a.org", "b.org", self.DETAILS]

    @pytest.mark.parametrize(
        "args",
        [
            {"enable-prompt-tokens-details": True},
            {"enable_prompt_tokens_details": False},
            {"--enable-prompt-tokens-details": None},
            {"no-enable-prompt-tokens-details": True},
        ],
    )
    def test_args_override_the_report_of_cached_tokens(self, args: dict[str, Any]) -> None:
        assert self.DETAILS not in process(args).added_flags(())

    @pytest.mark.parametrize(
        ("args", "by_priority"),
        [
            ({}, False),
            ({"scheduling-policy": "fcfs"}, False),
            ({"scheduling-policy": "priority"}, True),
            ({"scheduling_policy": "priority"}, True),
        ],
    )
    def test_priority_follows_the_scheduling_flag(
        self, args: dict[str, Any], by_priority: bool
    ) -> None:
        assert process(args).by_priority is by_priority


class TestEnvironment:
    def test_key_of_vllm_cannot_be_set(self) -> None:
        assert faults(with_engine(env={"VLLM_API_KEY": "x"})) == [
            "model demo: engines[0].env.VLLM_API_KEY: cannot be set: the gateway sends no key to "
            "the engines that it runs"
        ]

    @pytest.mark.parametrize("name", ["PGHOST", "AWS_*", "_x*", "lower_1"])
    def test_names_and_prefixes_are_inherited(self, name: str) -> None:
        [spec] = load(with_engine(inherit_env=[name])).models[0].engines
        assert isinstance(spec, ProcessSpec)
        assert spec.inherit_env == [name]

    @pytest.mark.parametrize("name", ["", "*", "A*B", "A-B", "A=B", "A B", "1A", "A\n"])
    def test_neither_name_nor_prefix_is_refused(self, name: str) -> None:
        [line] = faults(with_engine(inherit_env=[name]))
        assert line.startswith("model demo: engines[0].inherit_env[0]: ")
        assert line.endswith("is neither the name of a variable nor a prefix such as AWS_*")

    @pytest.mark.parametrize("name", ["GATEWAY_ADMIN_KEY", "GATEWAY_*", "VLLM_API_KEY"])
    def test_forbidden_variable_is_refused(self, name: str) -> None:
        line = f"model demo: engines[0].inherit_env[0]: {name} is never inherited by an engine"
        assert faults(with_engine(inherit_env=[name])) == [line]

    def test_key_of_a_remote_engine_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GPU_BOX_KEY", OTHER)
        engines: list[dict[str, Any]] = [
            {"kind": "process", "model": "m", "inherit_env": ["GPU_BOX_KEY"]},
            {"kind": "remote", "url": "http://h", "api_key_env": "GPU_BOX_KEY"},
        ]
        assert faults(dump(engines)) == [
            "model demo: engines[0].inherit_env: GPU_BOX_KEY is the key of a remote engine "
            "(api_key_env) and is never inherited"
        ]


class TestMissingModel:
    def test_missing_path_is_reported(self) -> None:
        spec = ProcessSpec(kind="process", model="./nothing-here")
        assert spec.missing_model() == "model directory ./nothing-here does not exist"

    def test_existing_path_is_accepted(self, tmp_path: Path) -> None:
        assert ProcessSpec(kind="process", model=str(tmp_path)).missing_model() is None

    def test_repository_is_not_searched_on_disk(self) -> None:
        assert ProcessSpec(kind="process", model="Qwen/Qwen3-0.6B").missing_model() is None


class TestIncompleteModel:
    def test_directory_without_a_configuration_is_no_models(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()
        fault = ProcessSpec(kind="process", model=str(tmp_path)).incomplete_model()
        assert fault == f"directory {tmp_path} holds no config.json, so it is not a model's"

    @pytest.mark.parametrize("args", [{}, {"load-format": "safetensors"}])
    def test_directory_without_weights_is_reported(
        self, tmp_path: Path, args: dict[str, Any]
    ) -> None:
        (tmp_path / "config.json").touch()
        fault = ProcessSpec(kind="process", model=str(tmp_path), args=args).incomplete_model()
        assert fault == f"directory {tmp_path} holds no weights (*.safetensors or *.bin)"

    @pytest.mark.parametrize(
        ("names", "args"),
        [
            (("config.json", "model-00001-of-00002.safetensors"), {}),
            (("params.json", "consolidated.safetensors"), {}),
            (("model-Q4_K_M.gguf",), {}),
            (("config.json",), {"load-format": "dummy"}),
            (("config.json",), {"load-format": "runai_streamer"}),
        ],
    )
    def test_what_vllm_loads_is_accepted(
        self, tmp_path: Path, names: tuple[str, ...], args: dict[str, Any]
    ) -> None:
        for name in names:
            (tmp_path / name).touch()
        spec = ProcessSpec(kind="process", model=str(tmp_path), args=args)
        assert spec.incomplete_model() is None

    @pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "/nowhere", __file__])
    def test_what_is_no_directory_is_left_to_others(self, model: str) -> None:
        assert ProcessSpec(kind="process", model=model).incomplete_model() is None


def discovering(**fields: Any) -> str:
    """Return a file whose only engine discovers its servers."""
    return dump([{"kind": "remote", "discover": fields}])


class TestDiscovery:
    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"dns": "vllm.default.svc", "port": 8000}, "vllm.default.svc:8000 by DNS"),
            ({"dns": "vllm.default.svc.", "port": 1}, "vllm.default.svc.:1 by DNS"),
            ({"file": "engines.json"}, "file engines.json"),
        ],
    )
    def test_source_is_described_in_a_few_words(self, fields: dict[str, Any], text: str) -> None:
        model = load(discovering(**fields)).models[0]
        [spec] = model.discovering
        assert spec.discover is not None
        assert spec.discover.describe() == text
        assert model.continues_streams

    @pytest.mark.parametrize(
        ("fields", "fault"),
        [
            ({}, ": needs exactly one of dns, file and kubernetes"),
            (
                {"kubernetes": {"selector": "app=vllm", "port": 0}},
                ".kubernetes.port: must be a port from 1 to 65535, or the name of one, not 0",
            ),
            ({"dns": "a", "port": 1, "file": "b"}, ": needs exactly one of dns, file and kubern"),
            ({"dns": "a"}, ".port: is needed with dns, and only there"),
            ({"file": "a", "port": 1}, ".port: is needed with dns, and only there"),
            ({"dns": "a", "port": 70000}, ".port: must be "),
            ({"dns": "http://a", "port": 1}, ".dns: must be a host name such as"),
            ({"dns": "a..b", "port": 1}, ".dns: must be a host name such as"),
            ({"dns": "a b", "port": 1}, ".dns: must be a host name such as"),
            ({"dns": ".".join(["a" * 60] * 5), "port": 1}, ".dns: is longer than 253 characters"),
            ({"dns": "a", "port": 1, "api_key_envs": ["A"]}, ".api_key_envs: needs file"),
            ({"dns": "a", "port": 1, "ttl": 5}, ".ttl: unknown key"),
        ],
    )
    def test_other_sources_are_refused(self, fields: dict[str, Any], fault: str) -> None:
        assert faults(discovering(**fields))[0].startswith(
            f"model demo: engines[0].discover{fault}"
        )

    def test_variables_of_a_file_are_set_and_withheld(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = discovering(file="engines.json", api_key_envs=["BOX_KEY", "OTHER_KEY"])
        monkeypatch.setenv("BOX_KEY", OTHER)
        monkeypatch.delenv("OTHER_KEY", raising=False)
        [fault] = faults(text)
        assert fault.endswith("api_key_envs[1]: environment variable OTHER_KEY is not set")
        monkeypatch.setenv("OTHER_KEY", OTHER)
        assert load(text).key_variables == {"BOX_KEY", "OTHER_KEY"}


TP2 = {"tensor-parallel-size": 2}


class TestRay:
    @pytest.mark.parametrize(
        ("fields", "fault"),
        [
            ({"gpus": [0, 1]}, "gpus: must be auto or a number of GPUs: Ray chooses the devices"),
            ({"gpus": 0}, "gpus: must be auto or a number of GPUs, not 0"),
            ({"gpus": 1, "resources": {"GPU": 1}}, "resources.GPU: is set by gpus"),
            ({"resources": {"a b": 1}}, "resources.a b: cannot be the name of a resource"),
            ({"model": "./here"}, "model: must be an absolute path on the nodes, or a repository"),
            ({"args": {"nnodes": 2}}, "args.nnodes: is set by nodes of the engine"),
            ({"args": {"node-rank": 1}}, "args.node-rank: is set by the gateway"),
            ({"args": {"master-a": "10.0.0.1"}}, "args.master-a: is set by the gateway"),
            (
                {"args": {"distributed-executor-backend": "ray"}},
                "args.distributed-executor-backend: must be mp or uni for kind: ray",
            ),
            (
                {"nodes": 2, "args": {**TP2, "distributed-executor-backend": "uni"}},
                "args.distributed-executor-backend: must be mp for kind: ray",
            ),
            (
                {"nodes": 2, "args": {**TP2, "data-parallel-external-lb": True}},
                "args.data-parallel-external-lb: cannot be set for an engine over several nodes; "
                "use replicas",
            ),
            (
                {"nodes": 2},
                "nodes: vLLM's ranks must divide evenly among 2 nodes: without a parallel size, it "
                "has 1 rank",
            ),
            (
                {"nodes": 3, "args": {**TP2, "pipeline-parallel-size": 2}},
                "nodes: vLLM's ranks must divide evenly among 3 nodes: tensor-parallel-size 2 and "
                "pipeline-parallel-size 2 make 4 ranks",
            ),
            (
                {"nodes": 2, "gpus": 1, "args": {"tensor-parallel-size": 4}},
                "nodes: tensor-parallel-size 4 on 2 nodes needs 2 GPUs of each, not 1 (gpus)",
            ),
            (
                {"nodes": 2, "args": TP2, "env": {"VLLM_HOST_IP": "10.0.0.1"}},
                "env.VLLM_HOST_IP: is set by the gateway, on each node",
            ),
            (
                {"nodes": 2, "args": {"tensor-parallel-size": "two"}},
                "nodes: tensor-parallel-size must be a whole number above 0, not two",
            ),
        ],
    )
    def test_what_a_cluster_cannot_do_is_refused(self, fields: dict[str, Any], fault: str) -> None:
        [line] = faults(dump([{"kind": "ray", "model": "org/m", **fields}]))
        assert line.startswith(f"model demo: engines[0].{fault}")

    def test_engine_over_several_nodes_is_one_whose_ranks_divide_evenly(self) -> None:
        args = {"tensor-parallel-size": 4, "data-parallel-size": 1, "pipeline-parallel-size": 3}
        spec = {"kind": "ray", "model": "org/m", "nodes": 3, "gpus": 4, "args": args}
        load(dump([spec]))

    def test_directory_here_is_an_absolute_path_on_the_nodes(self) -> None:
        Path("var/demo-model").mkdir(parents=True)
        placed = {"kind": "ray", "model": "var/demo-model", "resources": {"GPU": 1}}
        [spec] = load(dump([placed])).models[0].engines
        assert isinstance(spec, RaySpec)
        assert spec.model_path == str(Path("var/demo-model").absolute())
        assert spec.resources == {"GPU": 1}

    def test_directory_is_looked_for_on_the_nodes_only(self) -> None:
        [spec] = load(dump([{"kind": "ray", "model": "/not/here"}])).models[0].engines
        assert isinstance(spec, RaySpec)
        assert spec.model_path == "/not/here"

    @pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "[fd00::1]:6379", "h:1"])
    def test_address_of_a_cluster(self, address: str) -> None:
        assert RaySettings(address=address).address == address

    @pytest.mark.parametrize("address", ["", "ray://h:10001", "h", "h:0", "h:65536", "h:x"])
    def test_wrong_address_is_refused(self, address: str) -> None:
        with pytest.raises(ValidationError, match="must be auto, local or HOST:PORT"):
            RaySettings(address=address)


class TestRemote:
    @pytest.mark.parametrize(
        "url",
        ["http://h", "https://h", "http://h:8000", "http://[::1]:8000", "http://h/prefix/v2"],
    )
    def test_valid_url_is_kept_unchanged(self, url: str) -> None:
        (engine,) = load(with_remote(url=url)).models[0].engines
        assert isinstance(engine, RemoteSpec)
        assert engine.url == url

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("gpu-box:8000", "must look like http://host:port or https://host"),
            ("ftp://gpu-box", "must look like http://host:port or https://host"),
            ("http://gpu-box:8000/v1", "must not end in /v1"),
            ("https://gpu-box/prefix/v1/", "must not end in /v1"),
            ("http://", "must look like http://host:port or https://host"),
            ("", "must look like http://host:port or https://host"),
            ("unix:/run/x.sock", "must look like http://host:port or https://host"),
            ("http://u:p@h", "must not hold credentials; name a variable in api_key_env"),
            ("http://u@h", "must not hold credentials; name a variable in api_key_env"),
            ("http://h/?a=b", "must not have a query or a fragment"),
            ("http://h/#a", "must not have a query or a fragment"),
        ],
    )
    def test_invalid_url_is_refused_with_the_reason(self, url: str, words: str) -> None:
        assert faults(with_remote(url=url))[0].startswith(f"model demo: engines[0].url: {words}")

    @pytest.mark.parametrize(
        "url",
        [
            "http://h:99999",
            "http://h:abc",
            "http://h:0",
            "http://h:-1",
            "http://[::1",
            "http://a b",
            "http://h/a b",
            "http://h/\r\nX-Injected: y",
            "http://h\n",
        ],
    )
    def test_url_without_a_valid_request_target_is_refused(self, url: str) -> None:
        assert faults(with_remote(url=url))[0].startswith("model demo: engines[0].")

    @pytest.mark.parametrize("value", [None, ""])
    def test_variable_of_a_remote_key_must_be_set(
        self, value: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GPU_BOX_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("GPU_BOX_KEY", value)
        found = faults(with_remote(api_key_env="GPU_BOX_KEY"))
        assert (
            found[0]
            == "model demo: engines[0].api_key_env: environment variable GPU_BOX_KEY is not set"
        )

    def test_url_or_discover_is_needed(self) -> None:
        neither = "model demo: engines[0]: needs either url or discover"
        assert faults(dump([{"kind": "remote"}])) == [neither]
        assert faults(with_remote(discover={"file": "engines.json"})) == [neither]

    def test_remote_key_is_not_in_the_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GPU_BOX_KEY", OTHER)
        found = load(with_remote(api_key_env="GPU_BOX_KEY"))
        assert OTHER not in repr(found) + repr(found.model_dump())

    @pytest.mark.parametrize(
        "url", ["ftp://u:canary/x@h", "ftp://u:p@canary@h", "ftp://canary@h", "u:canary@h"]
    )
    def test_credentials_in_an_invalid_url_are_hidden(self, url: str) -> None:
        [found] = faults(with_remote(url=url))
        assert "must look like http://host:port" in found
        assert "canary" not in found

    def test_key_in_place_of_its_variable_is_hidden(self) -> None:
        [found] = faults(with_remote(api_key_env="canary0123456789"))
        assert found.endswith("environment variable of that name is not set")

    @pytest.mark.parametrize(
        ("fields", "names"),
        [
            ({"args": {"hf-token=canary": 1}}, "'hf-token…' is not the name of a flag"),
            ({"args": {"hf-token canary": 1}}, "'hf-token…' is not the name of a flag"),
            ({"env": {"HF_TOKEN=canary": "1"}}, "'HF_TOKEN…' cannot be an environment variable"),
            ({"inherit_env": ["HF_TOKEN=canary"]}, "'HF_TOKEN…' is neither the name of a variable"),
        ],
    )
    def test_value_after_a_name_is_hidden(self, fields: dict[str, Any], names: str) -> None:
        [found] = faults(with_engine(**fields))
        assert names in found
        assert "canary" not in found
