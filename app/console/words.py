"""Words of other packages that pages show as they are, for the catalogues."""

from app.console.language import noop

ENGINE_STATES = (
    noop("stopped"),
    noop("starting"),
    noop("ready"),
    noop("draining"),
    noop("stopping"),
    noop("asleep"),
    noop("failed"),
)
ADAPTER_STATES = (noop("loading"), noop("loaded"))
OPERATIONS = (noop("load"), noop("unload"), noop("sleep"), noop("wake"), noop("restart"))
# Of a request, without underscores.
OUTCOMES = (
    noop("in flight"),
    noop("completed"),
    noop("refused"),
    noop("failed"),
    noop("disconnected"),
    noop("canceled"),
)
# Of engines, without underscores.
KINDS = (
    noop("process"),
    noop("container"),
    noop("in process"),
    noop("ray"),
    noop("remote"),
)
START_PHASES = (
    noop("pulling the image"),
    noop("reading the configuration"),
    noop("starting the engine"),
    noop("downloading the model"),
    noop("loading weights"),
    noop("profiling memory"),
    noop("compiling"),
    noop("making the KV cache"),
    noop("capturing graphs"),
    noop("warming up"),
    noop("starting the API server"),
    noop("serving"),
)
# Of routing, without underscores.
POLICIES = (
    noop("least loaded"),
    noop("round robin"),
    noop("prefix"),
    noop("session"),
)
# Of engines: names of `engines.base.EngineFacts` without underscores and units.
FACTS = (
    noop("gateway model"),
    noop("kind"),
    noop("load"),
    noop("memory"),
    noop("version"),
    noop("model"),
    noop("architecture"),
    noop("dtype"),
    noop("quantization"),
    noop("max model len"),
    noop("tensor parallel size"),
    noop("pipeline parallel size"),
    noop("data parallel size"),
    noop("attention backend"),
    noop("weights load"),
    noop("weights"),
    noop("kv cache"),
    noop("kv cache tokens"),
    noop("max concurrency"),
    noop("compile"),
    noop("graph capture"),
    noop("init"),
    noop("sampling defaults"),
    noop("chat template format"),
    noop("supported tasks"),
)
# Phases of a request, without underscores.
PHASES = (
    noop("auth"),
    noop("body"),
    noop("limits"),
    noop("load wait"),
    noop("queue"),
    noop("attempt"),
    noop("prefill"),
    noop("decode"),
    noop("generate"),
    noop("interrupted"),
    noop("client wait"),
)
# Why a sign-in by an identity provider failed.
SIGN_IN_FAULTS = (
    noop("The answer of the identity provider is not valid. Start again."),
    noop("This sign-in has begun in another window or browser. Start again."),
    noop("The answer is of another identity provider. Start again."),
    noop("Too many people sign in now. Try again in a moment."),
    noop("The identity provider does not answer now. Try again later."),
    noop("The identity provider sent no ID token."),
    noop("The identity provider gave no claims of your account."),
    noop("The keys of the identity provider are not there yet."),
    noop("The identity provider refused%(code)s."),
    noop("The identity provider refused%(code)s. Start again."),
    noop("The identity provider does not answer: %(reason)s."),
    noop("The provider's ID token has no usable %(claim)s."),
    noop("The provider's ID token is not valid: %(reason)s."),
    noop("No access: your account has no usable %(claim)s."),
    noop("No access: %(claim)s of your account has no role."),
)
