"""Takes an interrupted stream on at another engine, or at its own after the restart.

The request keeps what it holds of limits, budget and queue. While it is at no engine its slot is
suspended, so the engines that are left get no more requests at once than they may. A model that is
loaded on demand is released meanwhile: it may have been interrupted to make room.

One continuation per death. A request that was on two engines that died may be the cause, and is
never tried on a third. A move on purpose is no death, so it may follow any number of others.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter

from app.admission import Permit
from app.continuation import (
    WITH_IDS,
    Answer,
    Diverged,
    IdDecoder,
    NotReplayed,
    Origin,
    Recording,
    Way,
    choose_target,
    count_thought,
    cut_at_text,
    may_come,
    replay_members,
)
from app.errors import GatewayError
from app.relay.call_builder import CallBuilder
from app.relay.engine_call import CallResult
from app.relay.forward import Interrupted, end_stream, forward
from app.relay.request_context import RequestContext
from app.relay.response import Truncated, as_gateway_error, send_error
from app.relay.services import RelayServices
from app.relay.stream import KeepAlive
from app.routing import Replica
from app.sse import DONE
from app.telemetry.metrics import Buckets
from app.usage import Usage
from engines.base import EngineDrained, EngineError, EngineNotReady

log = logging.getLogger(__name__)

# Deaths of engines after which a request is not tried again.
MAX_DEATHS = 2
# Seconds of silence after which a waiting client gets an SSE comment, unless configured otherwise.
KEEPALIVE_S = 5.0
# Seconds until an engine that refused for its load is asked again.
RETRY_S = 0.5
_BUSY = (429, 503)


class _Lost(Exception):
    """The stream cannot go on; the text is the word of the outcome."""


class StreamContinuation:
    """One interrupted stream on its way to its end. Use it once."""

    def __init__(
        self,
        services: RelayServices,
        request: RequestContext,
        calls: CallBuilder,
        result: CallResult,
        *,
        permit: Permit,
        renew_lease: Callable[[], Awaitable[None]] | None,
        latency: Buckets,
    ) -> None:
        """`renew_lease` releases the lease of an on-demand model and waits for its next load."""
        self._services = services
        self._request = request
        self._calls = calls
        self._model = calls.model
        self._result = result
        self._permit = permit
        self._renew_lease = renew_lease
        self._latency = latency
        # Of the present continuation.
        self._recording: Recording
        self._origin: Origin
        self._fault: EngineError | None = None
        self._interrupted_at = 0.0
        self._wait_until = 0.0  # in the loop's time
        self._comments: KeepAlive | None = None  # until the first new bytes
        self._way = Way.NONE
        self._recomputed = 0  # tokens that it computes again

    async def run(self, interrupted: Interrupted, deaths: int) -> None:
        """Take the stream on to its end; `deaths` counts engines that died under it before.

        Raises Truncated, after an error event, where it cannot go on, and what `forward` raises.
        """
        lost: Interrupted | None = interrupted
        try:
            while lost is not None:
                deaths += not isinstance(lost.fault, EngineDrained)
                self._begin(lost)
                lost = await self._go_on(deaths)
        except _Lost as reason:
            await self._end(str(reason))
        except (Diverged, NotReplayed) as error:
            log.warning("stream not continued: %s", error, extra=self._request.log_fields)
            await self._end("diverged" if isinstance(error, Diverged) else "refused")
        except GatewayError as error:  # an answer that is not fit for a client
            log.warning("stream not continued: %s", error.message, extra=self._request.log_fields)
            await self._end("refused")
        except asyncio.CancelledError:
            if self._comments is not None:  # before the first new bytes
                self._count("disconnected")
            raise
        finally:
            self._stop_comments()

    def _begin(self, lost: Interrupted) -> None:
        """Begin a continuation: note the fault and the time, and keep the client's connection."""
        recording, origin = lost.call.recording, lost.call.origin
        assert recording is not None
        assert origin is not None
        self._recording, self._origin = recording, origin
        # A traceback would keep the request until the next garbage collection.
        lost.with_traceback(None)
        self._fault, self._interrupted_at = lost.fault.with_traceback(None), perf_counter()
        self._request.timeline.interrupted(lost.fault)
        terms = self._model.continuation
        assert terms is not None
        self._wait_until = asyncio.get_running_loop().time() + terms.wait_s
        if self._comments is None:
            # To the first new bytes: comparing a repeated answer may take minutes as well.
            seconds = self._services.bounds.keepalive_s or KEEPALIVE_S
            self._comments = KeepAlive(self._request.exchange, seconds)

    async def _go_on(self, deaths: int) -> Interrupted | None:
        """Send the stream to the next engine; return None at its end, or its next interruption.

        Raises _Lost.
        """
        if self._recording.has_ended():
            await self._finish(b"")
            return None
        if self._calls.plan.rewrite.withhold_usage and (answer := self._recording.whole_answer()):
            await self._complete(answer)
            return None
        if deaths >= MAX_DEATHS:
            raise _Lost("died_again")
        while True:
            target = await self._next_target()
            try:
                return await self._send(target)
            except EngineNotReady as fault:
                # Nothing was sent: the same interruption.
                self._request.timeline.interrupted(fault)
                if asyncio.get_running_loop().time() + RETRY_S > self._wait_until:
                    raise _Lost("no_replica") from None
                await asyncio.sleep(RETRY_S)

    async def _next_target(self) -> Replica:
        """Return the engine at which the stream goes on, once there is one. Raises _Lost."""
        begun = bool(self._result.events)
        self._way, reason = self._recording.choose_way(begun=begun)
        if self._way is Way.NONE:
            raise _Lost(reason)
        self._permit.suspend()
        try:
            async with asyncio.timeout_at(self._wait_until):
                target = await self._wait_for_target()
                await self._permit.resume()
                # Another may have become the better one meanwhile; this one may have gone.
                return self._choose() or target
        except TimeoutError:
            raise _Lost("no_replica") from None

    async def _wait_for_target(self) -> Replica:
        """Return an engine that can go on, as soon as there is one. Raises _Lost."""
        moved = isinstance(self._fault, EngineDrained)
        if self._renew_lease is not None and (moved or self._choose() is None):
            # Also with another engine READY: the whole model may have to give way.
            try:
                await self._renew_lease()
            except GatewayError as error:
                log.warning("stream not continued: %s", error, extra=self._request.log_fields)
                raise _Lost("no_replica") from None
            if moved:  # the engine that it left may have stayed after all
                self._origin = self._origin.released()
        catalogue = self._services.catalogue
        while (target := self._choose()) is None:
            model = catalogue.get(self._model.name)
            if model is None or not (model.discovered or may_come(model.replicas, self._origin)):
                raise _Lost("no_replica")
            await catalogue.changes.next()
        return target

    def _choose(self) -> Replica | None:
        model = self._services.catalogue.get(self._model.name)
        return None if model is None else choose_target(model.replicas, self._origin)

    async def _send(self, target: Replica) -> Interrupted | None:
        """Send the continuation to an engine, and its answer to the client.

        Returns None at the end of the stream, or its next interruption. Raises EngineNotReady where
        nothing was sent, _Lost, Diverged, NotReplayed, and what `forward` raises.
        """
        request = self._request
        target.in_flight += 1
        try:
            changes = await self._prepare(target)
            call = self._calls.build_continuation(target, changes, self._recording)
            request.engine = target.engine.name
            request.timeline.begin_attempt(target.engine.name, self._fault)
            log.warning(
                "stream goes on at engine %s (%s): %s",
                *(target.engine.name, self._way, self._fault),
                extra=request.log_fields,
            )
            await forward(
                target.engine, call, request, self._latency, self._result,
                self._check_status, target.streams,
            )  # fmt: skip
        except Interrupted as again:
            return again
        except EngineNotReady:
            raise
        except EngineError as error:
            return Interrupted(error, call)
        else:
            return None
        finally:
            target.in_flight -= 1

    async def _check_status(self, status: int) -> None:
        """Raise where an engine refuses the continuation."""
        if status in _BUSY:
            raise EngineNotReady(f"the engine answered {status}")
        if status != 200:
            log.warning("stream not continued: status %d", status, extra=self._request.log_fields)
            raise _Lost("refused")

    async def _prepare(self, target: Replica) -> Mapping[str, bytes]:
        """Set up the seam; return the members of the request that change. Raises _Lost."""
        recording, result = self._recording, self._result
        if self._way is Way.REPLAY:
            answer = recording.answer
            assert answer is not None
            decoder = IdDecoder(target.engine, target.served_name)
            if await cut_at_text(
                answer, decoder, always=recording.calls_tools, all_shown=recording.shows_tokens
            ):
                defaults = target.engine.facts.sampling_defaults or {}
                limit = defaults.get("max_tokens")
                members = replay_members(
                    self._request.endpoint.label, answer, self._calls.plan.value,
                    limit if isinstance(limit, int) else None,
                )  # fmt: skip
                if members is None:
                    raise _Lost("finished")
                thought_tokens = await count_thought(answer, decoder)
                recording.begin_replay(answer, thought_tokens, self._note_resumed)
                self._recomputed = answer.prompt_tokens + len(answer.ids)
                return members
            if recording.sent is None:
                raise _Lost("unaligned")
            self._way = Way.VERIFY
        if not result.events:
            recording.begin_again(self._note_resumed)
            return {} if recording.answer is None else WITH_IDS
        assert recording.sent is not None
        recording.begin_verify(recording.sent, self._note_resumed)
        if result.partial_usage is not None:
            self._recomputed = result.partial_usage.prompt + result.partial_usage.completion
        return {}

    async def _complete(self, answer: Answer) -> None:
        """End a stream of which only the end mark is missing, and the usage that is withheld."""
        self._way = Way.REPLAY
        self._note_resumed()
        thought = answer.thought_tokens
        self._result.usage = Usage(answer.prompt_tokens, len(answer.ids), reasoning=thought)
        await self._finish(DONE)

    async def _finish(self, end: bytes) -> None:
        """End the response with what is withheld of it, and `end`."""
        meter = self._result.meter
        assert meter is not None
        await self._request.exchange.send_body(meter.flush() + end, more=False)
        self._result.complete = True

    def _note_resumed(self) -> None:
        """Count a continuation; called at its first new bytes."""
        request = self._request
        self._stop_comments()
        request.timeline.resumed()
        request.continued += 1
        request.recomputed_tokens += self._recomputed
        gap_s = perf_counter() - self._interrupted_at
        self._services.metrics.continuation_gap.observe((self._model.name,), gap_s)
        self._count("continued")

    def _stop_comments(self) -> None:
        if self._comments is not None:
            self._comments.stop()
            self._comments = None

    def _count(self, outcome: str) -> None:
        self._services.metrics.continuations.add((self._model.name, self._way, outcome))

    async def _end(self, reason: str) -> None:
        """End the stream with an error event. Raises Truncated and ClientStalled."""
        request, fault, meter = self._request, self._fault, self._result.meter
        assert fault is not None
        request.not_continued = reason
        self._count(reason)
        log.warning("stream ended, not continued (%s): %s", reason, fault, extra=request.log_fields)
        error = as_gateway_error(fault)
        if meter is None:
            await send_error(request.exchange, error)
        else:
            await end_stream(request.exchange, meter, error)
        raise Truncated(str(fault)) from None
