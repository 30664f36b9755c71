"""The process that runs vLLM's `LLM`: it reads a job and writes events, as lines of JSON.

`session.py` runs it under a guardian as `python -P -m engines.offline.worker FD`, with a socket as
FD; it is never imported. The first line that it reads is the job. The lines that it writes are

    {"event": "loaded", "max_model_len": n}
    {"event": "progress", "done": n, "prompt_tokens": n, "completion_tokens": n}
    {"event": "record", "place": n, "records": [...]}   the answers to a prompt, or its error
    {"event": "fault", "message": text}                 a user's error; nothing follows
    {"event": "done"}

vLLM's log goes to standard error, which is the guardian's log file.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from engines.hub import hub_fault
from engines.offline.job import Job
from engines.offline.reasoning import END, START, Answer, ends_in_thought, split_reasoning
from engines.spec import explain_removed_flag, nearest_flag

NUMA_NODES = Path("/sys/devices/system/node")
PROGRESS_S = 0.1
# Prompts in the engine, as a multiple of what it runs at once, so that enough are always queued.
WINDOW = 4
# GiB, unless the user sets it: vLLM's default is nine tenths of a CPU machine's memory, which fails
# where other processes use some. 4 is the default of earlier versions.
CPU_KV_CACHE_GIB = "4"
# A batch of so many answers ends before separate engine processes would have started: each imports
# vLLM again, which takes 8 s. Larger batches are faster with them, since the processes overlap.
FEW_ANSWERS = 128
# JSON has no infinity; vLLM's server writes the same.
LOWEST_LOGPROB = -9999.0
# What vLLM's validation errors append for its server.
PARAMETER = re.compile(r" \(parameter=[^()]*, value=.*\)$")

if __name__ == "__mp_main__":
    # A process that vLLM spawns imports this module first, as in engines.inside.vllm_gateway_serve.
    gc.set_threshold(5_000, 20, 20)


class UserError(Exception):
    """An error that the user can mend, in one line."""


class CommandChannel:
    """The socket to the command."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # processes of the engine must not keep it open
        self._file = socket.socket(fileno=fd).makefile("rw", encoding="utf-8", newline="\n")

    def read_job(self) -> Job:
        return Job.from_line(self._file.readline())

    def send(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")
        self._file.flush()


def main(fd: int) -> None:
    gc.disable()  # until the model is loaded, as in engines.inside.vllm_gateway_serve
    gc.set_threshold(5_000, 20, 20)
    channel = CommandChannel(fd)
    job = channel.read_job()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if Path(job.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        run(job, channel)
        last = {"event": "done"}
    except UserError as fault:
        last = {"event": "fault", "message": " ".join(str(fault).split())}
    # An orderly exit begins now: a signal is not needed to start it and must not cut it short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel.send(**last)


def run(job: Job, channel: CommandChannel) -> None:
    """Run a job. Raises UserError; other exceptions are vLLM's, and their trace goes to the log."""
    given = {_flag(key): value for key, value in job.engine}
    if (fault := hub_fault(job.model, given)) is not None:
        raise UserError(fault)  # before vLLM is imported, which takes half a minute

    from vllm import LLM
    from vllm.platforms import current_platform

    engine_args = parse_engine_args(job.model, job.engine)
    if current_platform.is_cpu():
        start_quickly(engine_args, job)
    parser_class = reasoning_parser_class(job.reasoning_parser)
    model_config = engine_args.create_model_config()
    if model_config.runner_type != "generate":
        raise UserError(f"{job.model} is not a model that generates text")
    params = sampling_params(model_config.get_diff_sampling_param(), job.sampling)
    llm = LLM.from_engine_args(engine_args)
    gc.freeze()
    gc.enable()
    batch = Batch(llm, job, params, make_splitter(llm, job, parser_class))
    channel.send("loaded", max_model_len=llm.model_config.max_model_len)
    for event in batch.run():
        channel.send(**event)


def start_quickly(engine_args: Any, job: Job) -> None:
    """Set defaults with which vLLM on a CPU starts in a third of the time, unless the user did.

    Without them, vLLM takes nine tenths of the memory for the KV cache, compiles the model at every
    start, and is imported in each of three processes.
    """
    given = {_flag(key).partition(".")[0] for key, _ in job.engine}
    if engine_args.kv_cache_memory_bytes is None and "gpu-memory-utilization" not in given:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_CACHE_GIB)
    if not given & {
        "enforce-eager",
        "no-enforce-eager",
        "compilation-config",
        "optimization-level",
    }:
        engine_args.enforce_eager = True
    answers = len(job.prompts) * job.sampling.get("n", 1)
    # Across NUMA nodes, only a separate process is bound to the memory of its cores.
    if answers <= FEW_ANSWERS and len(list(NUMA_NODES.glob("node[0-9]*"))) <= 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def _flag(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


def parse_engine_args(model: str, given: Sequence[tuple[str, str]]) -> Any:
    """Return vLLM's EngineArgs for (key, value) pairs, parsed as by `vllm serve`.

    Raises UserError.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is untyped here
        def error(self, message: str) -> NoReturn:
            raise UserError(f"engine flag {message.removeprefix('argument ')}")

    parser = EngineArgs.add_cli_args(Parser(allow_abbrev=False))
    actions = {name: action for action in parser._actions for name in action.option_strings}
    argv = [f"--model={model}"]
    for key, value in given:
        flag = _flag(key)
        action = actions.get(f"--{flag.partition('.')[0]}")
        if action is None or flag in ("help", "model"):
            if (instead := explain_removed_flag(flag)) is not None:
                raise UserError(f"--engine {key}: vLLM no longer has this flag: {instead}")
            near = nearest_flag(flag, [name.removeprefix("--") for name in actions])
            hint = f"; did you mean {near}?" if near else ""
            raise UserError(f"--engine {key}: vLLM has no such engine flag{hint}")
        switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
        if not switch:
            # One word, so that a value with a leading dash stays a value.
            argv.append(f"--{flag}={value}")
        elif value.lower() not in ("true", "false"):
            raise UserError(f"--engine {key}: {value!r} is neither true nor false")
        elif value.lower() == "true":
            argv.append(f"--{flag}")
        elif f"--no-{flag}" in actions:
            argv.append(f"--no-{flag}")
    try:
        return EngineArgs.from_cli_args(parser.parse_args(argv))
    except (ValueError, TypeError) as error:
        raise UserError(f"engine flags: {_first_line(error)}") from None


def sampling_params(defaults: dict[str, Any], given: Mapping[str, Any]) -> Any:
    """Return SamplingParams: what is given, else the model's defaults, else vLLM's.

    The default of max_tokens is what the context leaves, as in `vllm serve`, not the 16 of vLLM's
    class. Raises UserError.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    members = {
        "structured_outputs": StructuredOutputsParams,
        "repetition_detection": RepetitionDetectionParams,
    }
    fields = {"max_tokens": None, **defaults, **given}
    try:
        for name, made in members.items():
            if name in given:
                # vLLM ignores unknown keys.
                if unknown := given[name].keys() - {
                    field.name for field in dataclasses.fields(made)
                }:
                    raise UserError(f"sampling: {name} has no {min(unknown)!r}")
                fields[name] = made(**given[name])
        if biases := fields.get("logit_bias"):
            fields["logit_bias"] = {int(token): bias for token, bias in biases.items()}
        return SamplingParams(**fields)
    except (ValueError, TypeError, VLLMClientError) as error:
        also = f" (the model's defaults are {json.dumps(defaults)})" if defaults else ""
        raise UserError(f"sampling: {_first_line(error)}{also}") from None


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text; of a pydantic error, its first fault."""
    if callable(errors := getattr(error, "errors", None)):
        first = errors()[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg']}" if where else str(first["msg"])
    return PARAMETER.sub("", str(error).partition("\n")[0])


def reasoning_parser_class(name: str) -> Any:
    """Return vLLM's parser of this name; None for `auto` and `none`. Raises UserError."""
    if name in ("auto", "none"):
        return None
    from vllm.reasoning import ReasoningParserManager

    try:
        return ReasoningParserManager.get_reasoning_parser(name)
    except KeyError:
        known = ", ".join(ReasoningParserManager.list_registered())
        raise UserError(
            f"--reasoning-parser: vLLM has no {name!r}; it has auto, none, {known}"
        ) from None


Splitter = Callable[[str, str], Answer]


def make_splitter(llm: Any, job: Job, parser_class: Any) -> Splitter:
    """Return a function that splits an answer, from the rendered prompt and the answer's text.

    Raises UserError when the parser does not work with the model's tokenizer.
    """
    tokenizer = llm.get_tokenizer()
    if parser_class is None:
        if job.reasoning_parser == "none" or not {START, END} <= tokenizer.get_vocab().keys():
            return lambda prompt, text: Answer(None, text)
        return lambda prompt, text: split_reasoning(text, opened=ends_in_thought(prompt))
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(messages=[], model=job.model)
    options = {"chat_template_kwargs": job.chat_template_kwargs}
    try:
        parser_class(tokenizer, **options)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"--reasoning-parser {job.reasoning_parser}: {_first_line(error)}"
        ) from None

    def split(prompt: str, text: str) -> Answer:
        return Answer(*parser_class(tokenizer, **options).extract_reasoning(text, request))

    return split


class Batch:
    """The prompts of a job in the engine."""

    def __init__(self, llm: Any, job: Job, params: Any, split: Splitter) -> None:
        self._llm = llm
        self._job = job
        self._prompts = [prompt.to_json() for prompt in job.prompts]
        self._params = params
        self._split = split
        self._engine = llm.llm_engine
        self._tokenizer = llm.get_tokenizer()
        template = getattr(self._tokenizer, "chat_template", None)
        self._chat = bool(template) if job.chat is None else job.chat
        if self._chat and job.chat is True and template is None:
            raise UserError(f"--chat: {job.model} has no chat template")
        if job.system is not None and not self._chat:
            raise UserError(f"--system needs a chat template, and {job.model} has none")
        self._places: dict[str, int] = {}  # request id → place among the prompts
        self._done = self._prompt_tokens = self._completion_tokens = 0

    def run(self) -> Iterator[dict[str, Any]]:
        """Yield the events of all prompts, each prompt's records when it has finished."""
        waiting = iter(enumerate(self._prompts))
        window = WINDOW * self._engine.vllm_config.scheduler_config.max_num_seqs
        reported_at = 0.0
        while True:
            for place, prompt in itertools.islice(waiting, window - len(self._places)):
                if refusal := self._add(place, prompt):
                    self._done += 1
                    yield {"event": "record", "place": place, "records": [refusal]}
            if not self._places:
                if self._done == len(self._prompts):
                    break
                continue
            for output in self._engine.step():
                if output.finished:
                    place = self._places.pop(output.request_id)
                    self._done += 1
                    yield {
                        "event": "record",
                        "place": place,
                        "records": self._records(output, place),
                    }
            if (now := time.monotonic()) - reported_at >= PROGRESS_S:
                reported_at = now
                yield self._progress()
        yield self._progress()

    def _add(self, place: int, prompt: dict[str, Any]) -> dict[str, Any] | None:
        """Enqueue a prompt in the engine; return the record of its error if it is refused."""
        options: dict[str, Any] = {}
        if self._job.truncate_prompt_tokens is not None:
            options["truncate_prompt_tokens"] = self._job.truncate_prompt_tokens
        try:
            if not self._chat:
                if "messages" in prompt:
                    raise ValueError("messages need a chat template")  # noqa: TRY301
                [request] = self._llm.enqueue(
                    [prompt["prompt"]],
                    self._params.clone(),
                    use_tqdm=False,
                    tokenization_kwargs=options,
                )
            else:
                [request] = self._llm.enqueue_chat(
                    [self._messages(prompt)],
                    self._params.clone(),
                    use_tqdm=False,
                    chat_template_kwargs=self._job.chat_template_kwargs,
                    tokenization_kwargs=options,
                )
        except Exception as error:  # noqa: BLE001 - templates raise anything
            message = PARAMETER.sub("", " ".join(str(error).split())) or type(error).__name__
            return {**prompt, "error": {"message": message}}
        self._places[request.partition("-")[0]] = place
        return None

    def _messages(self, prompt: dict[str, Any]) -> list[dict[str, Any]]:
        messages = prompt.get("messages") or [{"role": "user", "content": prompt["prompt"]}]
        if self._job.system is not None and messages[0]["role"] != "system":
            return [{"role": "system", "content": self._job.system}, *messages]
        return list(messages)

    def _progress(self) -> dict[str, Any]:
        # Finished requests are counted here; the others are in the engine's own state.
        running = self._engine.output_processor.request_states.values()
        return {
            "event": "progress",
            "done": self._done,
            "prompt_tokens": self._prompt_tokens
            # Each of n answers has a state of its own, with the same prompt.
            + sum(state.prompt_len for state in running if not state.is_prefilling)
            // self._params.n,
            "completion_tokens": self._completion_tokens
            + sum(state.detokenizer.num_output_tokens() for state in running if state.detokenizer),
        }

    def _records(self, output: Any, place: int) -> list[dict[str, Any]]:
        """Return one record per answer, ordered by its index."""
        prompt_tokens = len(output.prompt_token_ids or ())
        self._prompt_tokens += prompt_tokens
        records = []
        for choice in sorted(output.outputs, key=lambda one: one.index):
            answer = self._split(output.prompt or "", choice.text)
            completion_tokens = len(choice.token_ids)
            self._completion_tokens += completion_tokens
            record = {
                **self._prompts[place],
                "choice": choice.index,
                "reasoning": answer.reasoning,
                "content": answer.content,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "usage": {
                    "prompt_tokens": prompt_tokens,
                    "cached_tokens": output.num_cached_tokens or 0,
                    "completion_tokens": completion_tokens,
                    "total_tokens": prompt_tokens + completion_tokens,
                },
            }
            if choice.logprobs is not None:
                record["logprobs"] = [_logprobs(one) for one in choice.logprobs]
            if output.prompt_logprobs is not None:
                record["prompt_logprobs"] = [_logprobs(one) for one in output.prompt_logprobs]
            records.append(record)
        return records


def _logprobs(position: Any) -> list[dict[str, Any]] | None:
    """Return the tokens of a position, the chosen one first; None for the first position."""
    return position and [
        {
            "token_id": token,
            "token": one.decoded_token,
            "logprob": max(one.logprob, LOWEST_LOGPROB),
            "rank": one.rank,
        }
        for token, one in position.items()
    ]


def exit_orderly(signum: int, frame: object) -> NoReturn:
    """Exit once, in order, so that vLLM gives its shared memory back."""
    signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_orderly)
    main(int(sys.argv[1]))
