"""What the requests of one key to one model at one endpoint have in common, bound once.

A binding is kept until anything that it was made from changes. `Bindings.find` is the only place
that decides so, at every request: the caller is the same object, since a changed key or owner is
another one; no model and no engine has changed, which the catalogue counts; and the gateway's
bounds and the secret of the cache salts are the same objects. So no other part of the gateway has
to remember to invalidate bindings, and no request gets an old one.
"""

import msgspec

from app.auth import Principal
from app.capture import CaptureRules
from app.limits import Limiter, LimitRequest, LimitScope
from app.relay.bounds import RelayBounds
from app.request_body import (
    BodyRules,
    CacheSalts,
    ConstantRewrite,
    Endpoint,
    FieldRuleCache,
    UsualCost,
)
from app.routing import Catalogue, Model, choose_target
from app.settings import NO_LIMITS
from app.telemetry import UNKNOWN_MODEL
from app.telemetry.metrics import Buckets, Metrics

# More combinations than are active at a time; beyond it, all are bound again.
MAX_BINDINGS = 4096


class Binding(msgspec.Struct, frozen=True, eq=False):
    """What the requests of a key to a model at an endpoint have in common."""

    principal: Principal
    model: Model
    # Whether an engine of the model may serve the endpoint.
    served: bool
    rules: BodyRules
    # The limits of a request, and of one that was charged before its body was read.
    limits: LimitScope
    precharged_limits: LimitScope
    # The gateway's own time before the request is sent.
    overhead: Buckets
    # The terms under which the requests are captured; None: they are not.
    capture: CaptureRules | None


class Bindings(msgspec.Struct, eq=False):
    """The bindings that are valid now."""

    _catalogue: Catalogue
    _limiter: Limiter
    _salts: CacheSalts
    _rules: FieldRuleCache
    _metrics: Metrics
    _most: int = MAX_BINDINGS
    # By key ID, the name that the client sent, and endpoint; for a model of a split its name as
    # well, since the key may not use it alone. Names are those of known models.
    _known: dict[tuple[str, ...], Binding] = {}
    # By key ID: the caller, and the limits of its requests before their model is known.
    _before_body: dict[str, tuple[Principal, LimitScope]] = {}
    # What all of them were made from.
    _changes: int = -1
    _bounds: RelayBounds | None = None
    _secret: bytes = b""

    def __len__(self) -> int:
        return len(self._known)

    def find(
        self, principal: Principal, name: str, endpoint: Endpoint, bounds: RelayBounds
    ) -> Binding:
        """Return the binding of a caller to the model with a name or alias, at an endpoint.

        Raises ModelNotFound.
        """
        if (
            self._catalogue.changes.count != self._changes
            or bounds is not self._bounds
            or self._salts.secret() is not self._secret
        ):
            self._known.clear()
            self._changes, self._bounds = self._catalogue.changes.count, bounds
            self._secret = self._salts.secret()
        at = (principal.id, name, endpoint.label)
        binding = self._known.get(at)
        if binding is None or binding.principal is not principal:
            model = self._catalogue.find(name, principal.allows)
            binding = self._bind(at, principal, model, endpoint, bounds)
        return binding

    def find_target(
        self, split: Binding, session: bytes, endpoint: Endpoint, bounds: RelayBounds
    ) -> Binding:
        """Return the binding of the model that serves a session of a split.

        `split` is what `find` has just returned; it stays where no model has a share.
        """
        name = choose_target(split.model.split, session)
        model = None if name is None else self._catalogue.get(name)
        if model is None or model is split.model:
            return split
        at = (split.principal.id, split.model.name, endpoint.label, model.name)
        binding = self._known.get(at)
        if binding is None or binding.principal is not split.principal:
            binding = self._bind(at, split.principal, model, endpoint, bounds)
        return binding

    def limits_before_body(self, principal: Principal) -> LimitScope:
        """Return the limits of a caller's request that is charged before its body is read."""
        known = self._before_body.get(principal.id)
        if known is None or known[0] is not principal:
            if len(self._before_body) >= self._most:
                self._before_body.clear()
            request = LimitRequest(
                principal.id, principal.limits, UNKNOWN_MODEL, NO_LIMITS, 0, owner=principal.owner
            )
            known = self._before_body[principal.id] = principal, self._limiter.scope(request)
        return known[1]

    def _bind(
        self,
        at: tuple[str, ...],
        principal: Principal,
        model: Model,
        endpoint: Endpoint,
        bounds: RelayBounds,
    ) -> Binding:
        """Keep a new binding and return it."""
        limits = LimitRequest(
            principal.id, principal.limits, model.name, model.limits, 0, owner=principal.owner
        )
        precharged = msgspec.structs.replace(limits, precharged=True)
        rules = bounds.capture
        binding = Binding(
            principal,
            model,
            model.serves(endpoint.label),
            self.body_rules(principal, model, endpoint, bounds),
            self._limiter.scope(limits),
            self._limiter.scope(precharged),
            self._metrics.overhead.buckets((model.name,)),
            rules if rules is not None and rules.covers(principal, model.name) else None,
        )
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[at] = binding
        return binding

    def body_rules(
        self, principal: Principal, model: Model, endpoint: Endpoint, bounds: RelayBounds
    ) -> BodyRules:
        """Return what a caller's tenant, the gateway and a model's engines demand of a body."""
        fields = self._rules.get(model, principal)
        salt = self._salts.salt(model.isolation, principal)
        return BodyRules(
            fields,
            salt,
            bounds.default_output_tokens,
            model.max_model_len,
            ConstantRewrite.of(endpoint.label, model.bounds, fields, salt),
            UsualCost.of(endpoint.label, model.max_model_len, bounds.default_output_tokens),
        )
