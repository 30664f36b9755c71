"""The process that holds vLLM's `LLM`: a job in, what becomes of it out, as lines of JSON.

Run by `session.py` below a guardian, never imported: `python -P -m engines.offline.worker FD`,
with a socket as FD. The first line that comes is the job; lines that go are

    {"event": "loaded", "max_model_len": n}
    {"event": "progress", "done": n, "prompt_tokens": n, "completion_tokens": n}
    {"event": "record", "place": n, "records": [...]}   one prompt has its answers, or its error
    {"event": "fault", "message": text}                 a mistake of the user's; nothing follows
    {"event": "done"}

What vLLM logs goes to standard error, which is the guardian's log file.
"""

import argparse
import dataclasses
import difflib
import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from engines.offline.reasoning import END, START, Answer, ends_in_thought, split_reasoning

NUMA_NODES = Path("/sys/devices/system/node")
PROGRESS_S = 0.1
# Prompts on the way at once, as a multiple of what the engine runs at once: always enough waiting.
WINDOW = 4
# GiB, where the user set nothing: by itself vLLM takes nine tenths of a CPU machine's memory, and
# does not start where others use it too. 4 was its own default once.
CPU_KV_CACHE_GIB = "4"
# A batch of so many answers is done before processes for the engine would have been started, each
# of which imports vLLM again, for 8 s. Larger ones are faster with them: the processes overlap.
FEW_ANSWERS = 128
# JSON has no infinity; vLLM's server writes the same.
LOWEST_LOGPROB = -9999.0
# What vLLM's validation errors append for its server.
PARAMETER = re.compile(r" \(parameter=[^()]*, value=.*\)$")


class Fault(Exception):
    """A mistake of the user's, in one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What the command asks for; see `session.Job`."""

    model: str
    engine: list[list[str]]
    sampling: dict[str, Any]
    prompts: list[dict[str, Any]]
    system: str | None
    chat: bool | None
    chat_template_kwargs: dict[str, Any]
    truncate_prompt_tokens: int | None
    reasoning_parser: str


class Link:
    """The socket to the command."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # what the engine starts must not keep it open
        self._file = socket.socket(fileno=fd).makefile("rw", encoding="utf-8", newline="\n")

    def job(self) -> Job:
        return Job(**json.loads(self._file.readline()))

    def say(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")
        self._file.flush()


def main(fd: int) -> None:
    link = Link(fd)
    job = link.job()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if Path(job.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        run(job, link)
        last = {"event": "done"}
    except Fault as fault:
        last = {"event": "fault", "message": " ".join(str(fault).split())}
    # Leaving in order begins now: a signal need not start it, and must not cut it short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link.say(**last)


def run(job: Job, link: Link) -> None:
    """Do a job. Raises Fault; what else is raised is the engine's, and its trace is for the log."""
    from vllm import LLM
    from vllm.platforms import current_platform

    engine_args = parse_engine_args(job.model, job.engine)
    if current_platform.is_cpu():
        start_quickly(engine_args, job)
    parser_class = reasoning_parser_class(job.reasoning_parser)
    model_config = engine_args.create_model_config()
    if model_config.runner_type != "generate":
        raise Fault(f"{job.model} is not a model that generates text")
    params = sampling_params(model_config.get_diff_sampling_param(), job.sampling)
    llm = LLM.from_engine_args(engine_args)
    batch = Batch(llm, job, params, make_splitter(llm, job, parser_class))
    link.say("loaded", max_model_len=llm.model_config.max_model_len)
    for event in batch.run():
        link.say(**event)


def start_quickly(engine_args: Any, job: Job) -> None:
    """Set, where the user set nothing, what makes vLLM on a CPU start in a third of the time.

    Without these, it takes nine tenths of the memory for the KV cache, compiles the model anew at
    every start, and imports itself once in each of three processes.
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
    # Across NUMA nodes, only a process of its own is bound to the memory of its cores.
    if answers <= FEW_ANSWERS and len(list(NUMA_NODES.glob("node[0-9]*"))) <= 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def _flag(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


def parse_engine_args(model: str, given: list[list[str]]) -> Any:
    """Return vLLM's EngineArgs of (key, value) pairs, read as `vllm serve` does. Raises Fault."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is untyped here
        def error(self, message: str) -> NoReturn:
            raise Fault(f"engine flag {message.removeprefix('argument ')}")

    parser = EngineArgs.add_cli_args(Parser(allow_abbrev=False))
    actions = {name: action for action in parser._actions for name in action.option_strings}
    argv = [f"--model={model}"]
    for key, value in given:
        flag = _flag(key)
        action = actions.get(f"--{flag.partition('.')[0]}")
        if action is None or flag in ("help", "model"):
            near = difflib.get_close_matches(f"--{flag}", actions, 1)
            hint = f"; did you mean {near[0][2:]}?" if near else ""
            raise Fault(f"--engine {key}: vLLM has no such engine flag{hint}")
        switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
        if not switch:
            # One word, so that a value that begins with a dash stays a value.
            argv.append(f"--{flag}={value}")
        elif value.lower() not in ("true", "false"):
            raise Fault(f"--engine {key}: {value!r} is neither true nor false")
        elif value.lower() == "true":
            argv.append(f"--{flag}")
        elif f"--no-{flag}" in actions:
            argv.append(f"--no-{flag}")
    try:
        return EngineArgs.from_cli_args(parser.parse_args(argv))
    except (ValueError, TypeError) as error:
        raise Fault(f"engine flags: {_first_line(error)}") from None


def sampling_params(defaults: dict[str, Any], given: dict[str, Any]) -> Any:
    """Return SamplingParams: what is given, else the model's defaults, else vLLM's. Raises Fault.

    The longest answer is by default what the context leaves, as in `vllm serve`, not the 16
    tokens of vLLM's class.
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
                # vLLM passes over keys that it does not know.
                if unknown := given[name].keys() - {
                    field.name for field in dataclasses.fields(made)
                }:
                    raise Fault(f"sampling: {name} has no {min(unknown)!r}")
                fields[name] = made(**given[name])
        if biases := fields.get("logit_bias"):
            fields["logit_bias"] = {int(token): bias for token, bias in biases.items()}
        return SamplingParams(**fields)
    except (ValueError, TypeError, VLLMClientError) as error:
        also = f" (the model's defaults are {json.dumps(defaults)})" if defaults else ""
        raise Fault(f"sampling: {_first_line(error)}{also}") from None


def _first_line(error: Exception) -> str:
    """Return what an error says; of a pydantic error, its first fault."""
    if callable(errors := getattr(error, "errors", None)):
        first = errors()[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg']}" if where else str(first["msg"])
    return PARAMETER.sub("", str(error).partition("\n")[0])


def reasoning_parser_class(name: str) -> Any:
    """Return vLLM's parser of this name; None for `auto` and `none`. Raises Fault."""
    if name in ("auto", "none"):
        return None
    from vllm.reasoning import ReasoningParserManager

    try:
        return ReasoningParserManager.get_reasoning_parser(name)
    except KeyError:
        known = ", ".join(ReasoningParserManager.list_registered())
        raise Fault(
            f"--reasoning-parser: vLLM has no {name!r}; it has auto, none, {known}"
        ) from None


Splitter = Callable[[str, str], Answer]


def make_splitter(llm: Any, job: Job, parser_class: Any) -> Splitter:
    """Return what parts an answer, given the prompt as the engine saw it and the answer's text.

    Raises Fault when the parser named cannot work with the model's tokenizer.
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
        raise Fault(f"--reasoning-parser {job.reasoning_parser}: {_first_line(error)}") from None

    def split(prompt: str, text: str) -> Answer:
        return Answer(*parser_class(tokenizer, **options).extract_reasoning(text, request))

    return split


class Batch:
    """The prompts on their way through the engine."""

    def __init__(self, llm: Any, job: Job, params: Any, split: Splitter) -> None:
        self._llm = llm
        self._job = job
        self._params = params
        self._split = split
        self._engine = llm.llm_engine
        self._tokenizer = llm.get_tokenizer()
        template = getattr(self._tokenizer, "chat_template", None)
        self._chat = bool(template) if job.chat is None else job.chat
        if self._chat and job.chat is True and template is None:
            raise Fault(f"--chat: {job.model} has no chat template")
        if job.system is not None and not self._chat:
            raise Fault(f"--system needs a chat template, and {job.model} has none")
        self._places: dict[str, int] = {}  # request id → place among the prompts
        self._done = self._prompt_tokens = self._completion_tokens = 0

    def run(self) -> Iterator[dict[str, Any]]:
        """Yield the events of all prompts, each prompt's records when it has finished."""
        waiting = iter(enumerate(self._job.prompts))
        window = WINDOW * self._engine.vllm_config.scheduler_config.max_num_seqs
        told = 0.0
        while True:
            for place, prompt in itertools.islice(waiting, window - len(self._places)):
                if refused := self._add(place, prompt):
                    self._done += 1
                    yield {"event": "record", "place": place, "records": [refused]}
            if not self._places:
                if self._done == len(self._job.prompts):
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
            if (now := time.monotonic()) - told >= PROGRESS_S:
                told = now
                yield self._progress()
        yield self._progress()

    def _add(self, place: int, prompt: dict[str, Any]) -> dict[str, Any] | None:
        """Give a prompt to the engine; return the record of its error if it is refused."""
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
        except Exception as error:  # noqa: BLE001 - templates raise what they like
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
        # Requests that have finished are counted; for the others the engine's own state knows.
        running = self._engine.output_processor.request_states.values()
        return {
            "event": "progress",
            "done": self._done,
            "prompt_tokens": self._prompt_tokens
            # Each of n answers has a state of its own, of the same prompt.
            + sum(state.prompt_len for state in running if not state.is_prefilling)
            // self._params.n,
            "completion_tokens": self._completion_tokens
            + sum(state.detokenizer.num_output_tokens() for state in running if state.detokenizer),
        }

    def _records(self, output: Any, place: int) -> list[dict[str, Any]]:
        """Return one record per answer, in the order of their numbers."""
        prompt_tokens = len(output.prompt_token_ids or ())
        self._prompt_tokens += prompt_tokens
        records = []
        for choice in sorted(output.outputs, key=lambda one: one.index):
            answer = self._split(output.prompt or "", choice.text)
            completion_tokens = len(choice.token_ids)
            self._completion_tokens += completion_tokens
            record = {
                **self._job.prompts[place],
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
    """Return the tokens of a position, the one that stands there first; None for the first one."""
    return position and [
        {
            "token_id": token,
            "token": one.decoded_token,
            "logprob": max(one.logprob, LOWEST_LOGPROB),
            "rank": one.rank,
        }
        for token, one in position.items()
    ]


def end(signum: int, frame: object) -> NoReturn:
    """Leave in order, once, so that vLLM gives back its shared memory."""
    signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    main(int(sys.argv[1]))
