"""Hosts vLLM in this process: `AsyncLLM` and vLLM's own ASGI application. Verified on vLLM 0.32.

vLLM is imported here only, when an engine starts. It is built as `vllm serve` builds it
(`vllm.entrypoints.launchers.api_server.entry`), and must not take over its host process:

- Its loggers would write to the gateway's standard output; they write to the engine's log file. One
  of its imports sets the level of the root logger, which is restored.
- EngineCore is spawned: a forked process would inherit the gateway's sockets and threads. It starts
  its own processes as the engine's environment says.
- Its processes are run through `detach.py` (by way of `multiprocessing.set_executable`).
- It sets neither signal handlers nor the loop's policy, and its metrics are in prometheus-client's
  global registry, where the gateway's are not. Its lifespan, which freezes the garbage
  collector's heap once more and logs statistics, is not run.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from engines.base import Progress
from engines.guard import scratch
from engines.guard.process_tree import MARKER_VARIABLE
from engines.inprocess.bridge import App
from engines.inside import METHOD, import_cli_args
from engines.output import EngineLog
from engines.output.failure import classify
from engines.output.startup import find_start_failure

# The environment and multiprocessing's executable are per process, and so is the lock on them.
_BUILDING = threading.Lock()
DETACH = Path(__file__).parents[1] / "guard" / "detach.py"
# The format of vLLM's own log (vllm/logger.py), which `engines.output.startup` reads.
LOG_FORMAT = (
    "(APIServer pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
)
LOG_DATE_FORMAT = "%m-%d %H:%M:%S"
# Interval of the pings to EngineCore, which responds between two steps unless it is stuck.
PING_S = 5.0
# The directory of vLLM's sockets (vllm/envs.py); by default TMPDIR, which here is the gateway's.
RPC_BASE = "VLLM_RPC_BASE_PATH"
# A loop that was not scheduled for a while runs its late timers before it reads the reply.
LATE_S = 1.0


class BuildFailed(Exception):
    """An engine could not be built; the text is one line for the author of the configuration."""


class Hosted:
    """A vLLM engine whose processes are children of this one."""

    def __init__(self, llm: Any, args: argparse.Namespace, handler: logging.Handler) -> None:
        self._llm = llm
        self._args = args
        self._handler = handler
        self._app: Any = None

    async def application(self) -> App:
        """Return vLLM's ASGI application over the engine. Raises what vLLM raises."""
        with _restore_logging():
            return await self._application()

    async def _application(self) -> App:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        # Built in a thread, it has not begun to read EngineCore's messages, its death among them.
        self._llm._run_output_handler()
        await self._llm.reset_mm_cache()
        tasks = await self._llm.get_supported_tasks()
        app = await asyncio.to_thread(build_app, self._args, tasks, self._llm.model_config)
        self._app = app
        await init_app_state(self._llm, app.state, self._args, tasks)
        # vLLM sets `should_exit` here when it finds its engine dead.
        app.state.server = SimpleNamespace(should_exit=False)
        application: App = app
        return application

    def dead(self) -> bool:
        """Return whether EngineCore has died; True before the application reports it."""
        errored: bool = self._llm.errored
        return errored

    async def wait_for_death(self, timeout_s: float) -> str:
        """Return the reason when EngineCore has died or not responded for `timeout_s` seconds."""
        pings = asyncio.create_task(self._ping(timeout_s))
        try:
            await asyncio.wait(
                {pings, self._llm.output_handler}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            pings.cancel()
        if not self.dead():
            return f"EngineCore did not respond for {timeout_s:g} s (progress_timeout_s)"
        processes = getattr(self._llm.engine_core.resources.engine_manager, "processes", ())
        code = next((process.exitcode for process in processes if process.exitcode), None)
        if code is None:
            return "EngineCore ended"
        return f"EngineCore {_ended(code)}"

    def shutdown(self, grace: float) -> None:
        """End its processes, by force after `grace` seconds. Blocks."""
        self._llm.shutdown(timeout=grace)
        if self._app is not None:
            del self._app.state  # as its lifespan does: the application is referenced elsewhere
        # Its finalizer would do that again, at the interpreter's exit, and fail there.
        self._llm.shutdown = _do_nothing
        multiprocessing.active_children()  # reaps those that have ended
        logging.getLogger("vllm").removeHandler(self._handler)
        self._handler.close()

    async def _ping(self, timeout_s: float) -> None:
        """Return when EngineCore has not responded to a ping in time."""
        while True:
            await asyncio.sleep(PING_S)
            call = asyncio.ensure_future(self._llm.engine_core.get_supported_tasks_async())
            try:
                for timeout in (timeout_s, LATE_S):
                    await asyncio.wait({call}, timeout=timeout)
                if not call.done() or call.exception() is not None:
                    return
            finally:
                call.cancel()


class Construction:
    """The construction of one engine, in a dedicated thread."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], directory: Path, withheld: Sequence[str]
    ) -> None:
        """`directory` is the engine's; its path is the mark of the engine's processes.

        `withheld` names variables of this process that those do not inherit.
        """
        self._argv = argv
        self._env = env
        self._withheld = withheld
        self._directory = directory
        self._log = directory / "engine.log"
        self.temporary: Path | None = None  # None: as in the environment
        self._abandoned = threading.Event()
        self.progress = Progress("waiting for its turn")
        self.running = False
        self.hosted: Hosted | None = None

    def run(self) -> Hosted:
        """Build and return the engine. Blocks. Raises BuildFailed."""
        self.running = True
        try:
            with _BUILDING:
                self.hosted = self._build()
                return self.hosted
        except BuildFailed:
            raise
        except ImportError as error:
            raise BuildFailed(f"vLLM cannot be imported ({error}): run `make setup`") from None
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises
            raise BuildFailed(self.reason(error)) from None
        finally:
            self.running = False

    def abandon(self) -> None:
        """Have it stop at the next phase; killing the engine's processes ends the present one."""
        self._abandoned.set()

    def reason(self, error: Exception) -> str:
        """Return the cause of vLLM's error in one line; EngineCore's is in the engine's log."""
        own = [line for text in traceback.format_exception_only(error) for line in text.split("\n")]
        return str(find_start_failure([*EngineLog(self._log).read(), *own]) or own[0])

    def _build(self) -> Hosted:
        self._begin_phase("importing vLLM")
        os.environ.update(self._env)
        os.environ[METHOD] = "spawn"  # this process has threads
        handler = logging.FileHandler(self._log, encoding="utf-8")
        handler.setFormatter(logging.Formatter(LOG_FORMAT, LOG_DATE_FORMAT))
        try:
            with (
                _restore_logging(),
                _executable(self._write_executable()),
                _sockets_in(self.temporary),
            ):
                _log_to(handler)
                # Its import adds a handler on this stream, which `_log_to` removes.
                with contextlib.redirect_stdout(handler.stream):
                    import vllm.logger  # noqa: F401
                _log_to(handler)
                return self._build_with(handler)
        except BaseException:
            logging.getLogger("vllm").removeHandler(handler)
            handler.close()
            raise

    def _build_with(self, handler: logging.Handler) -> Hosted:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.launcher import validate_api_server_args
        from vllm.logger import configure_logging_from_args
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        self._begin_phase("reading the configuration")
        cli_args = import_cli_args()
        parser = cli_args.make_arg_parser(FlexibleArgumentParser(prog="vllm"))
        parser.error = _refuse
        args = parser.parse_args(list(self._argv))
        # Not None: vLLM would take VLLM_API_KEY of this process and ask clients for that key.
        args.api_key = [""]
        configure_logging_from_args(args)
        _log_to(handler)
        cli_args.validate_parsed_serve_args(args)
        if args.tool_parser_plugin:
            ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if args.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
        validate_api_server_args(args)
        engine_args = AsyncEngineArgs.from_cli_args(args)
        cli_args.propagate_flash_late_interaction(args, engine_args)
        config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        self._begin_phase("loading the model")
        llm = AsyncLLM.from_vllm_config(
            vllm_config=config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            enable_log_requests=engine_args.enable_log_requests,
            aggregate_engine_logging=engine_args.aggregate_engine_logging,
            disable_log_stats=engine_args.disable_log_stats,
        )
        self.progress = Progress("building the application")
        return Hosted(llm, args, handler)

    def _begin_phase(self, phase: str) -> None:
        if self._abandoned.is_set():
            raise BuildFailed("its start was abandoned")
        self.progress = Progress(phase)

    def _write_executable(self) -> Path:
        """Write the script that starts vLLM's processes; return its path."""
        python = sys.executable
        mark = f"{MARKER_VARIABLE}={self._directory}"
        detach = [str(DETACH), str(os.getpid()), mark, str(self._log), json.dumps(self._withheld)]
        command = [python, "-I", "-S", *detach, python]
        # For EngineCore's own processes.
        variables = {METHOD: self._env[METHOD]} if METHOD in self._env else {}
        if self.temporary is not None:
            own = scratch.variables(self._directory, self.temporary)
            variables |= {name: value for name, value in own.items() if name not in self._env}
        lines = [
            "#!/bin/sh",
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            f'exec {shlex.join(command)} "$@"\n',
        ]
        script = self._directory / "python.sh"
        script.write_text("\n".join(lines))
        script.chmod(0o700)
        return script


def end_tracker() -> None:
    """Stop multiprocessing's resource tracker, unless an engine uses it. Blocks.

    At its end it removes the shared memory that killed processes have left.
    """
    handlers = logging.getLogger("vllm").handlers
    if not any(isinstance(handler, logging.FileHandler) for handler in handlers):
        tracker = multiprocessing.resource_tracker._resource_tracker
        tracker._stop()  # type: ignore[attr-defined] # private, in CPython 3.11 to 3.14


def _do_nothing() -> None:
    pass


def _refuse(message: str) -> NoReturn:
    raise BuildFailed(str(classify(message, refused=True)))


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended (code {code})"


def _log_to(handler: logging.Handler) -> None:
    """Send vLLM's log to this handler and to the files of other engines, and nowhere else."""
    logger = logging.getLogger("vllm")
    logger.propagate = False
    if logger.level == logging.NOTSET:  # before its import
        logger.setLevel(logging.INFO)
    others = [h for h in logger.handlers if isinstance(h, logging.FileHandler) and h is not handler]
    logger.handlers[:] = [*others, handler]


@contextlib.contextmanager
def _restore_logging() -> Iterator[None]:
    """Restore the root logger at the end of the body."""
    root = logging.getLogger()
    level, handlers, factory = root.level, root.handlers[:], logging.getLogRecordFactory()
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        logging.setLogRecordFactory(factory)


@contextlib.contextmanager
def _sockets_in(directory: Path | None) -> Iterator[None]:
    """Set the directory of the sockets between vLLM's processes, unless it is configured."""
    if directory is None or RPC_BASE in os.environ:
        yield
        return
    os.environ[RPC_BASE] = str(directory)
    try:
        yield
    finally:
        del os.environ[RPC_BASE]


@contextlib.contextmanager
def _executable(path: Path) -> Iterator[None]:
    """Have multiprocessing run this file instead of the interpreter."""
    # Started before: the tracker serves all engines and must not carry the mark of one.
    multiprocessing.resource_tracker.ensure_running()
    before = multiprocessing.spawn.get_executable()
    multiprocessing.spawn.set_executable(str(path))
    try:
        yield
    finally:
        multiprocessing.spawn.set_executable(before)
