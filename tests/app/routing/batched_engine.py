"""An engine that computes in batches and caches prefixes, as vLLM's scheduler does. Simulated.

A step generates a token for each running request and computes prompts with what is left of the
batch's tokens, the first come first. A prompt that does not fit into the KV cache waits, and all
behind it. When the cache is full the request that came last is preempted: it waits at the head, and
what is evicted of it meanwhile is computed again. Blocks of no running request stay cached until
their place is needed, the least recently used first, and of one request the last block first.

Simpler than vLLM: blocks of BLOCK_TOKENS, whole blocks only, and a prompt takes its blocks when it
starts, so that one which starts in the same step has them cached.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# vLLM's are 16 tokens; larger ones make the simulation quicker.
BLOCK_TOKENS = 200
# vLLM's max-num-batched-tokens for a server on an H100.
BATCH_TOKENS = 8192
# Seconds: of a step, of each sequence in it, of each prompt token. From a published report of
# Qwen3-32B on two H100: 26 ms between tokens with few requests, 76 ms with about 150 per replica.
# The third is the model's arithmetic at 40 % of what the GPUs can do.
STEP_S, SEQUENCE_S, PROMPT_TOKEN_S = 0.022, 0.00036, 0.00008


@dataclass(eq=False)
class Job:
    """A request at the engine: `blocks` identify those of its prompt."""

    blocks: Sequence[int]
    answer: int  # tokens to generate, whole blocks
    on_first_token: Callable[[float], None]
    on_end: Callable[[float], None]
    generated: int = 0
    own_blocks: list[int] = field(default_factory=list)  # of its answer
    cached: int | None = None  # blocks that were cached when it first started
    uncomputed: int = 0  # prompt tokens
    has_begun: bool = False  # it has a first token
    runs: int = 0  # how often it was preempted

    @property
    def held(self) -> list[int]:
        """Its blocks in the KV cache."""
        return [*self.blocks, *self.own_blocks]


class BatchedEngine:
    """One replica. While `busy` it runs one step after the other."""

    def __init__(self, kv_tokens: int) -> None:
        self._free = kv_tokens // BLOCK_TOKENS  # blocks that hold nothing
        self._cached: OrderedDict[int, None] = OrderedDict()  # of no running request
        self._users: dict[int, int] = {}  # running requests by block
        self._waiting: deque[Job] = deque()
        self._prefills: deque[Job] = deque()
        self._computed: list[Job] = []  # prompts that are computed when the step ends
        self._decoding = 0
        self._running: list[Job] = []  # in order of arrival
        self._steps = 0
        # When a generating request has filled a block: number of the step, order, its run.
        self._due: list[tuple[int, int, int, Job]] = []
        self._full: list[tuple[int, Job]] = []  # those that need another block
        self._blocks = 0  # number of blocks of answers, whose names are negative
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, job: Job) -> None:
        self._waiting.append(job)

    def begin_step(self, now: float) -> float:
        """Begin a step at `now`; return when it ends, for `end_step`."""
        for run, job in self._full:
            self._go_on(run, job)
        self._full.clear()
        room, computed = BATCH_TOKENS - self._decoding, 0
        generating = self._decoding
        while computed < room and (self._prefills or self._start_next()):
            job = self._prefills[0]
            part = min(job.uncomputed, room - computed)
            job.uncomputed -= part
            computed += part
            if not job.uncomputed:
                self._computed.append(self._prefills.popleft())
        return now + STEP_S + generating * SEQUENCE_S + computed * PROMPT_TOKEN_S

    def end_step(self, now: float) -> None:
        """End the step: tell of first tokens and ends of requests."""
        self._steps += 1
        for job in self._computed:
            self._decoding += 1
            self._expect_full_block(job)
            if not job.has_begun:
                job.has_begun = True
                job.on_first_token(now)
        self._computed.clear()
        while self._due and self._due[0][0] <= self._steps:
            _, _, run, job = heapq.heappop(self._due)
            if run != job.runs:
                continue
            job.generated += BLOCK_TOKENS
            if job.generated < job.answer:
                self._full.append((run, job))
                continue
            self._decoding -= 1
            self._running.remove(job)
            self._release(job)
            job.on_end(now)

    def _expect_full_block(self, job: Job) -> None:
        self._blocks += 1
        due = self._steps + BLOCK_TOKENS
        heapq.heappush(self._due, (due, self._blocks, job.runs, job))

    def _go_on(self, run: int, job: Job) -> None:
        """Give a generating request another block, if need be of those that came last."""
        while run == job.runs and not self._has_room(1):
            self._preempt(self._running[-1])
        if run == job.runs:
            self._own_another(job)
            self._expect_full_block(job)

    def _own_another(self, job: Job) -> None:
        self._blocks += 1
        job.own_blocks.append(-self._blocks)
        self._use(-self._blocks)

    def _preempt(self, job: Job) -> None:
        self.preemptions += 1
        job.runs += 1
        self._running.remove(job)
        if job in self._prefills:
            self._prefills.remove(job)
        else:
            self._decoding -= 1
        self._release(job)
        # What it has of a block that is not full is lost.
        del job.own_blocks[job.generated // BLOCK_TOKENS :]
        self._waiting.appendleft(job)

    def _start_next(self) -> bool:
        """Start the first waiting request if the cache has room for it; return whether."""
        if not self._waiting:
            return False
        job = self._waiting[0]
        held = job.held
        known = next((n for n, b in enumerate(held) if not self._is_cached(b)), len(held))
        if not self._has_room(len(held) - known + 1, keeping=held[:known]):
            return False
        self._waiting.popleft()
        for block in held:
            self._use(block)
        self._own_another(job)
        if job.cached is None:
            job.cached = known
        # Of a prompt that is cached whole the last token is computed.
        job.uncomputed = max((len(held) - known) * BLOCK_TOKENS, 1)
        self._running.append(job)
        self._prefills.append(job)
        return True

    def _is_cached(self, block: int) -> bool:
        return block in self._users or block in self._cached

    def _has_room(self, blocks: int, keeping: Sequence[int] = ()) -> bool:
        kept = sum(block in self._cached for block in keeping)
        return self._free + len(self._cached) - kept >= blocks

    def _use(self, block: int) -> None:
        if block in self._users:
            self._users[block] += 1
            return
        self._users[block] = 1
        if block in self._cached:
            del self._cached[block]
        elif self._free:
            self._free -= 1
        else:
            self._cached.popitem(last=False)

    def _release(self, job: Job) -> None:
        for block in reversed(job.held):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._cached[block] = None
