"""Continues an interrupted stream at another engine, or at its own after the restart.

The request keeps what it holds of limits, budget and queue. While it is at no engine its slot is
suspended, so the engines that are left get no more requests at once than they may. A model that is
loaded on demand is released meanwhile: it may have been interrupted to make room.

One continuation per death. A request that was on two engines that died may be the cause, and is
never tried on a third. A move on purpose is no death, so it may follow any number of others.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import perf_counter

import msgspec

from app.admission import Permit
from app.continuation import (
    WITH_IDS,
    Answer,
    CannotGoOn,
    Diverged,
    IdDecoder,
    NotReplayed,
    Origin,
    Recording,
    Repeat,
    Replay,
    Verify,
    Way,
    choose_target,
    count_thought,
    cut_at_text,
    may_come,
    replay_members,
    thinks_again,
)
from app.errors import GatewayError
from app.relay.call_builder import CallBuilder
from app.relay.engine_call import CallResult
from app.relay.forward import Interrupted, end_stream, forward
from app.relay.request_context import RequestContext
from app.relay.response import Truncated, as_gateway_error
from app.relay.services import RelayServices
from app.relay.stream import send_comments
from app.routing import Model, Replica, note_failure
from app.sse import DONE
from app.usage import StreamMeter, Usage
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


class Interruption(msgspec.Struct, frozen=True):
    """One interruption of a stream."""

    fault: EngineError
    origin: Origin  # the engine that it left
    at: float  # by perf_counter
    wait_until: float  # for an engine to go on at, in the loop's time

    @property
    def is_move(self) -> bool:
        """True if the engine was drained, and did not fail."""
        return isinstance(self.fault, EngineDrained)


class StreamContinuation(msgspec.Struct, eq=False):
    """Continues one interrupted stream to its end. Use it once."""

    _services: RelayServices
    _calls: CallBuilder
    _request: RequestContext
    _result: CallResult
    _recording: Recording
    _meter: StreamMeter
    _permit: Permit
    # Releases the lease of an on-demand model and waits for its next load.
    _renew_lease: Callable[[], Awaitable[None]] | None
    _comments: asyncio.Task[None] | None = None  # until the first new bytes
    _way: Way = Way.NONE  # of the latest attempt, for the metric

    async def run(self, interrupted: Interrupted) -> None:
        """Continue the interrupted stream to its end.

        Raises Truncated, after an error event, where it cannot go on, and what `forward` raises.
        """
        fault, log_fields, deaths = (
            interrupted.fault,
            self._request.log_fields,
            self._request.deaths,
        )
        lost: Interrupted | None = interrupted
        try:
            while lost is not None:
                interruption = self._note_interruption(lost)
                fault = interruption.fault
                deaths += not interruption.is_move
                lost = await self._go_on(interruption, deaths)
        except _Lost as reason:
            await self._end(str(reason), fault)
        except (Diverged, NotReplayed) as error:
            log.warning("stream not continued: %s", error, extra=log_fields)
            await self._end("diverged" if isinstance(error, Diverged) else "refused", fault)
        except GatewayError as error:  # an answer that is not fit for a client
            log.warning("stream not continued: %s", error.message, extra=log_fields)
            await self._end("refused", fault)
        except asyncio.CancelledError:
            if self._comments is not None:  # before the first new bytes
                self._count("disconnected")
            raise
        finally:
            self._stop_comments()

    def _note_interruption(self, lost: Interrupted) -> Interruption:
        """Note the fault and the time, and keep the client's connection."""
        # A traceback would keep the request until the next garbage collection.
        lost.with_traceback(None)
        fault, origin = lost.fault.with_traceback(None), self._recording.origin
        if self._renew_lease is not None and isinstance(fault, EngineDrained):
            origin = origin.released()  # after the next load: the engine may have stayed
        self._request.timeline.interrupted(fault)
        if self._comments is None:
            # Sent until the first new bytes: comparing a repeated answer may take minutes as well.
            seconds = self._services.bounds.keepalive_s or KEEPALIVE_S
            comments = send_comments(self._request.exchange, seconds)
            self._comments = asyncio.create_task(comments)
        wait_until = asyncio.get_running_loop().time() + self._recording.terms.wait_s
        return Interruption(fault, origin, perf_counter(), wait_until)

    async def _go_on(self, interruption: Interruption, deaths: int) -> Interrupted | None:
        """Send the stream to the next engine; return None at its end, or its next interruption.

        Raises _Lost.
        """
        recording = self._recording
        if recording.has_ended():
            await self._finish(b"")
            return None
        if self._calls.plan.rewrite.withhold_usage and (answer := recording.whole_answer()):
            await self._complete(answer, interruption)
            return None
        if deaths >= MAX_DEATHS:
            raise _Lost("died_again")
        while True:
            way = recording.next_way(begun=bool(self._result.events))
            self._way = way.way
            if isinstance(way, CannotGoOn):
                raise _Lost(way.reason)
            target = await self._next_target(interruption)
            try:
                return await self._send(target, way, interruption)
            except EngineNotReady as fault:
                # Nothing was sent: the same interruption.
                self._request.timeline.interrupted(fault)
                if asyncio.get_running_loop().time() + RETRY_S > interruption.wait_until:
                    raise _Lost("no_replica") from None
                await asyncio.sleep(RETRY_S)

    async def _next_target(self, interruption: Interruption) -> Replica:
        """Return the engine at which the stream goes on, once there is one. Raises _Lost."""
        self._permit.suspend()
        try:
            async with asyncio.timeout_at(interruption.wait_until):
                target = await self._wait_for_target(interruption)
                await self._permit.resume()
                # Another may have become the better one meanwhile; this one may have gone.
                return self._choose(interruption.origin) or target
        except TimeoutError:
            raise _Lost("no_replica") from None

    async def _wait_for_target(self, interruption: Interruption) -> Replica:
        """Return an engine that can go on, as soon as there is one. Raises _Lost."""
        origin, catalogue = interruption.origin, self._services.catalogue
        if self._renew_lease is not None and (interruption.is_move or self._choose(origin) is None):
            # Also with another engine READY: the whole model may have to give way.
            try:
                await self._renew_lease()
            except GatewayError as error:
                log.warning("stream not continued: %s", error, extra=self._request.log_fields)
                raise _Lost("no_replica") from None
        while (target := self._choose(origin)) is None:
            model = self._present_model()
            if model is None or not (
                model.discovered or model.is_loading_adapter or may_come(model.replicas, origin)
            ):
                raise _Lost("no_replica")
            await catalogue.changes.next()
        return target

    def _choose(self, origin: Origin) -> Replica | None:
        model = self._present_model()
        return None if model is None else choose_target(model.able, origin)

    def _present_model(self) -> Model | None:
        """Return the model as it is now; None: it is gone, or an adapter has other weights."""
        began = self._calls.model
        model = self._services.catalogue.get(began.name)
        if model is None or model.adapter_source != began.adapter_source:
            return None
        return model

    async def _send(
        self, target: Replica, way: Replay | Verify | Repeat, interruption: Interruption
    ) -> Interrupted | None:
        """Send the continuation to an engine, and its answer to the client.

        Returns None at the end of the stream, or its next interruption. Raises EngineNotReady where
        nothing was sent, _Lost, Diverged, NotReplayed, and what `forward` raises.
        """
        request, fault = self._request, interruption.fault
        target.in_flight += 1
        try:
            changes = await self._prepare(target, way, interruption)
            self._recording.origin = Origin.of(target)
            call = self._calls.build(target, changes, self._recording)
            request.engine = target.engine.name
            request.timeline.begin_attempt(target.engine.name, fault)
            message = "stream goes on at engine %s (%s): %s"
            log.warning(message, request.engine, self._way, fault, extra=request.log_fields)
            await forward(self._services, target, call, request, self._result, self._check_status)
        except Interrupted as again:
            if not isinstance(again.fault, EngineDrained):
                self._note_broken(target)
            return again
        except EngineNotReady:
            raise
        except EngineError as error:
            self._note_broken(target)
            return Interrupted(error, self._recording, self._meter)
        else:
            return None
        finally:
            target.in_flight -= 1

    def _note_broken(self, replica: Replica) -> None:
        model = self._calls.model
        note_failure(replica, model.replicas, model.eject_after)

    async def _check_status(self, status: int) -> None:
        """Raise where an engine refuses the continuation."""
        if status in _BUSY:
            raise EngineNotReady(f"the engine answered {status}")
        if status != 200:
            log.warning("stream not continued: status %d", status, extra=self._request.log_fields)
            raise _Lost("refused")

    async def _prepare(
        self, target: Replica, way: Replay | Verify | Repeat, interruption: Interruption
    ) -> Mapping[str, bytes]:
        """Set up the seam; return the members of the request that change. Raises _Lost."""
        recording = self._recording
        if isinstance(way, Replay):
            members = await self._prepare_replay(target, way.answer, interruption)
            if members is not None:
                return members
            if recording.sent is None:
                raise _Lost(way.answer.replay_obstacle or "unaligned")
            way, self._way = Verify(recording.sent), Way.VERIFY
        if isinstance(way, Verify):
            usage = self._result.partial_usage
            tokens = 0 if usage is None else usage.prompt + usage.completion
            recording.begin_verify(way.sent, partial(self._note_resumed, interruption, tokens))
            return {}
        recording.begin_again(partial(self._note_resumed, interruption))
        return {} if recording.answer is None else WITH_IDS

    async def _prepare_replay(
        self, target: Replica, answer: Answer, interruption: Interruption
    ) -> Mapping[str, bytes] | None:
        """Set up the seam of a replay; None: where it would go on is not known. Raises _Lost."""
        recording = self._recording
        decoder = IdDecoder(target.engine, target.served_name)
        if not await cut_at_text(
            answer, decoder, always=recording.calls_tools, all_shown=recording.shows_tokens
        ):
            return None
        if await thinks_again(answer, decoder):
            answer.thought_resumed = True
            return None
        limit = (target.engine.facts.sampling_defaults or {}).get("max_tokens")
        members = replay_members(
            self._request.endpoint.label, answer, self._calls.plan.value,
            limit if isinstance(limit, int) else None,
        )  # fmt: skip
        if members is None:
            raise _Lost("finished")
        tokens = answer.prompt_tokens + len(answer.ids)
        on_resumed = partial(self._note_resumed, interruption, tokens)
        recording.begin_replay(answer, await count_thought(answer, decoder), on_resumed)
        return members

    async def _complete(self, answer: Answer, interruption: Interruption) -> None:
        """End a stream of which only the end mark is missing, and the usage that is withheld."""
        self._way = Way.REPLAY
        self._note_resumed(interruption)
        thought = answer.thought_tokens
        self._result.usage = Usage(answer.prompt_tokens, len(answer.ids), reasoning=thought)
        await self._finish(DONE)

    async def _finish(self, end: bytes) -> None:
        """End the response with what is withheld of it, and `end`."""
        await self._request.exchange.send_body(self._meter.flush() + end, more=False)
        self._result.complete = True

    def _note_resumed(self, interruption: Interruption, recomputed: int = 0) -> None:
        """Count a continuation at its first new bytes, and the tokens that it computed again."""
        request = self._request
        self._stop_comments()
        request.timeline.resumed()
        request.continued += 1
        request.recomputed_tokens += recomputed
        gap_s = perf_counter() - interruption.at
        self._services.metrics.continuation_gap.observe((self._calls.model.name,), gap_s)
        self._count("continued")

    def _stop_comments(self) -> None:
        if self._comments is not None:
            self._comments.cancel()
            self._comments = None

    def _count(self, outcome: str) -> None:
        self._services.metrics.continuations.add((self._calls.model.name, self._way, outcome))

    async def _end(self, reason: str, fault: EngineError) -> None:
        """End the stream with an error event. Raises Truncated and ClientStalled."""
        request = self._request
        request.not_continued = reason
        self._count(reason)
        log.warning("stream ended, not continued (%s): %s", reason, fault, extra=request.log_fields)
        await end_stream(request, self._meter, as_gateway_error(fault))
        raise Truncated(str(fault)) from None
