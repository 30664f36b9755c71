"""Serves one request with one model: its lease, its queue, a replica, and the engine's response.

Every resource is released in one place, on success, error and cancellation alike: lease and permit
by `with`, the replica's slot by `finally`, the engine's response in `forward.py`.
"""

import asyncio
from collections.abc import Coroutine
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import msgspec

from app.admission import Permit
from app.asgi import ClientStalled
from app.errors import EngineFailed, EngineOverloaded, EngineUnavailable
from app.limits import LimitDecision
from app.relay.attempts import Attempts
from app.relay.billing import OUTPUT_WEIGHT, billed_usage, engine_work, limited_tokens
from app.relay.call_builder import CallBuilder
from app.relay.continuation import StreamContinuation
from app.relay.engine_call import CallResult
from app.relay.fallback_chain import FallbackChain
from app.relay.forward import Interrupted, forward
from app.relay.request_context import RequestContext
from app.relay.response import NotRouted, Truncated
from app.relay.services import RelayServices
from app.relay.stored_responses import claim
from app.request_body import BodyPlan, ParsedBody, check_taken, media_kinds, plan_body
from app.residency import ModelLease, StartWait
from app.routing import FAULTS, Model, Replica, ReportedTokens
from app.telemetry import LOAD_WAIT, QUEUE
from app.usage import BudgetReservation, Usage
from engines.base import EngineDrained, EngineError

WaitedT = TypeVar("WaitedT", ModelLease, Permit, StartWait)


class ModelRequest(msgspec.Struct, eq=False):
    """One request at one model, and after that failed, at another."""

    services: RelayServices
    request: RequestContext
    # What the request has reserved: given back unless it is settled.
    decision: LimitDecision
    budget: BudgetReservation | None  # None: the key has none
    # When the request was planned, by perf_counter; 0.0 once it has failed at the requested model.
    planned_at: float
    # The latest fallback's, which the caller releases.
    fallback: LimitDecision | None = None

    def serve(
        self, plan: BodyPlan, tokens: int, chain: FallbackChain | None = None
    ) -> Coroutine[Any, Any, None]:
        """Return what serves the request once the model is loaded and has a free slot.

        Awaiting raises CANNOT_SERVE. The wait for a load ends early when a fallback of `chain` is
        up before. `tokens`: what it may take, for its turn in the queue.
        """
        if plan.model.on_demand:
            return self._serve_on_demand(plan, tokens, chain)
        return self._serve_loaded(plan, tokens)

    async def _serve_on_demand(
        self, plan: BodyPlan, tokens: int, chain: FallbackChain | None
    ) -> None:
        """Serve the request while its model is kept loaded. Raises CANNOT_SERVE."""
        if not plan.model.ready:
            # Not after a load.
            plan.check_output_fits(self.request.endpoint.label)
            await self._check_media(plan)
        # The lease comes first: its queue is bounded, and a request that waits for a load must not
        # occupy a slot of an engine.
        with await self._lease(plan.model, chain) as lease:
            await self._serve_loaded(plan, tokens, lease)

    async def _serve_loaded(
        self, plan: BodyPlan, tokens: int, lease: ModelLease | None = None
    ) -> None:
        """Serve the request once the model, which is loaded, has a free slot.

        What that took is settled, however it ends.
        """
        services, request, base = self.services, self.request, plan.model.base
        result, canceled = CallResult(), False
        with services.admission.try_acquire(base) or await self._queue(plan, tokens) as permit:
            # A reload may have replaced its engines while the request waited.
            model = services.catalogue.current(plan.model)
            if self.planned_at and request.binding is not None:
                waited_s = request.queued_s or 0.0
                request.binding.overhead.observe(perf_counter() - self.planned_at - waited_s)
            calls = CallBuilder.of(services, request, plan, model)
            try:
                interrupted = await self._try_replicas(calls, result)
                if interrupted is not None:
                    await self._go_on(calls, result, interrupted, permit, lease)
            except (asyncio.CancelledError, ClientStalled):
                canceled = not request.stream_ended
                raise
            finally:
                if request.engine is not None:
                    self._settle(plan, result, canceled=canceled)
                    if permit.entry is not None and request.endpoint.metered:
                        permit.correct(engine_work(request.usage))
                if request.ttft_s is not None:
                    services.metrics.time_to_first_token.observe((model.name,), request.ttft_s)

    async def _try_replicas(self, calls: CallBuilder, result: CallResult) -> Interrupted | None:
        """Send the request to one replica after the other, until one has served it.

        Returns the interruption of a stream that may go on elsewhere.
        """
        services, request, model = self.services, self.request, calls.model
        on_head = None
        attempts = Attempts(model, calls.plan, request, services.metrics)
        while True:
            replica = attempts.next_replica()
            replica.in_flight += 1
            try:
                if calls.response_id is not None:
                    on_head = partial(self._claim, calls.response_id, model, replica)
                await forward(services, replica, calls.build(replica), request, result, on_head)
            except EngineError as error:
                attempts.note_failure(replica, error)
            except NotRouted:
                raise model.not_served(request.endpoint.label, request.requested_model) from None
            except Interrupted as interrupted:
                if not isinstance(interrupted.fault, EngineDrained):
                    attempts.note_broken(replica)
                return interrupted
            except (Truncated, EngineFailed):
                if result.status is not None and result.status >= 500:
                    attempts.note_answer(replica, result.status)  # a page of a proxy
                else:
                    attempts.note_broken(replica)
                raise
            else:
                if result.failed:
                    attempts.note_broken(replica)
                elif replica.health is not None or result.status in FAULTS:
                    attempts.note_answer(replica, result.status)
                if result.fingerprint is not None:
                    replica.fingerprint = result.fingerprint or replica.fingerprint
                return None
            finally:
                replica.in_flight -= 1
                if request.prefill is not None:
                    request.prefill.end()
                    request.prefill = None
                if request.on_end is not None:
                    request.on_end(_reported(result.usage))
                    request.on_end = None

    async def _go_on(
        self,
        calls: CallBuilder,
        result: CallResult,
        interrupted: Interrupted,
        permit: Permit,
        lease: ModelLease | None,
    ) -> None:
        """Let an interrupted stream go on at another engine."""
        renew = None
        if lease is not None:
            wait_s = interrupted.recording.terms.wait_s
            renew = partial(self._renew, lease, calls.model.base, wait_s)
        recording, meter = interrupted.recording, interrupted.meter
        await StreamContinuation(
            self.services, calls, self.request, result, recording, meter, permit, renew
        ).run(interrupted)

    async def _check_media(self, plan: BodyPlan) -> None:
        """Raise MediaNotTaken for media of a kind that the model is known not to take."""
        kinds = media_kinds(self.request.endpoint.label, plan.body)
        if not kinds:
            return
        taken = await asyncio.to_thread(plan.model.read_media)
        if taken is not None:
            check_taken(kinds, taken, plan.model.name)

    async def _queue(self, plan: BodyPlan, tokens: int) -> Permit:
        """Return a permit of the model's queue. Raises what `wait` raises."""
        admission, principal = self.services.admission, self.request.principal
        model = plan.model.base
        if self.request.endpoint.metered:
            tokens += (OUTPUT_WEIGHT - 1) * plan.cost.output
        waiting = admission.acquire(
            model, principal.id, principal.priority, principal.weight, tokens, self.request.deadline
        )
        return await self.wait(QUEUE, waiting, admission.counts(model)[1] + 1)

    async def wait(
        self, phase: str, waiting: Coroutine[Any, Any, WaitedT], position: int | None = None
    ) -> WaitedT:
        """Return a lease, a permit or a start, and note how long it took.

        `position` is the place in a queue. Raises EngineUnavailable and EngineOverloaded.
        """
        request = self.request
        began = perf_counter()
        before_s = request.queued_s
        request.timeline.begin(phase, position)
        try:
            got = await waiting
        except (asyncio.CancelledError, EngineOverloaded, EngineUnavailable):
            request.queued_s = (before_s or 0.0) + perf_counter() - began
            raise
        if got.waited_s is not None:
            request.queued_s = (before_s or 0.0) + got.waited_s
        request.timeline.end(waited=got.waited_s is not None)
        return got

    async def _lease(self, model: Model, chain: FallbackChain | None) -> ModelLease:
        """Return a lease on a model that is loaded on demand. Raises what `wait` raises."""
        lease = partial(self.services.loader.lease, model.base, self.request.principal.id)
        if chain is not None:
            lease = partial(lease, yields=chain.yields, bound_s=max(chain.left_s, 0.0))
        elif (deadline := self.request.deadline) is not None:
            lease = partial(lease, bound_s=max(deadline - perf_counter(), 0.0))
        return await self.wait(LOAD_WAIT, lease())

    async def _renew(self, lease: ModelLease, model: str, wait_s: float) -> None:
        """Release an on-demand model, and wait for its next load. Raises what `wait` raises."""
        again = partial(self.services.loader.lease, model, bound_s=wait_s, resumed=True)
        await lease.renew(lambda: self.wait(LOAD_WAIT, again()))

    async def _claim(self, response_id: str, model: Model, replica: Replica, status: int) -> None:
        """Record the owner of a response that the engine stores. Raises ServiceUnavailable."""
        if status < 300:
            # Before the first byte of the response is sent, hence before the client knows the ID.
            await claim(
                self.services.stored, response_id, self.request.principal.id, model, replica
            )

    def _settle(self, plan: BodyPlan, result: CallResult, *, canceled: bool) -> None:
        """Settle what a request took that reached an engine, however it ended."""
        request, decision, fallback = self.request, self.decision, self.fallback
        if not request.endpoint.metered:  # what was reserved is what it used
            decision.used = decision.terms.tokens
            if fallback is not None:
                fallback.used = fallback.terms.tokens
            return
        request.usage = usage = billed_usage(plan, result, canceled=canceled)
        if usage is None:
            return
        decision.used = limited_tokens(usage, self.services.bounds.cached_weight)
        if fallback is not None:
            fallback.used = decision.used
        if self.budget is not None:
            self.budget.settle(usage, plan.model.name)


def _reported(usage: Usage | None) -> ReportedTokens | None:
    """Return the tokens that routing learns from. An answer behind thoughts is not repeated so."""
    if usage is None:
        return None
    return ReportedTokens(usage.prompt, usage.cached, 0 if usage.reasoning else usage.completion)


def plan_request(
    services: RelayServices, request: RequestContext, body: ParsedBody, model: Model
) -> BodyPlan:
    """Return the plan of a request for another model or under a budget. Raises BadRequest."""
    rules = services.bindings.body_rules(
        request.principal, model, request.endpoint, services.bounds
    )
    if request.output_bound is not None:
        rules = msgspec.structs.replace(rules, output_bound=request.output_bound)
    return plan_body(request.endpoint.label, body, model, rules)
