"""An engine as vLLM's scheduler behaves under load, on a clock of its own."""

from collections import deque
from dataclasses import dataclass, field

from app.concurrency import EngineCounters


@dataclass(eq=False)
class _Request:
    prompt: int
    answer: int
    done: int = 0

    @property
    def held(self) -> int:
        """Tokens in the KV cache."""
        return self.prompt + self.done


@dataclass
class SimulatedEngine:
    """Runs at most `max_num_seqs` requests, whose tokens fit into `kv_tokens`.

    As vLLM's scheduler: the first come is the first served; a prompt that does not fit waits, and
    all behind it; when the cache is full the request that came last is preempted, loses what it has
    and waits at the head. One step gives each running request a token and takes `base_s` and
    `each_s` for each of them; a prompt takes `prompt_s` for a token.
    """

    max_num_seqs: int
    kv_tokens: int
    base_s: float = 0.02
    each_s: float = 0.0002
    prompt_s: float = 0.00002
    running: list[_Request] = field(default_factory=list)
    waiting: deque[_Request] = field(default_factory=deque)
    preemptions: int = 0
    generated: int = 0
    ended: int = 0

    def submit(self, prompt: int, answer: int) -> None:
        self.waiting.append(_Request(prompt, answer))

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def _held(self) -> int:
        return sum(one.held for one in self.running)

    def counters(self) -> EngineCounters:
        usage = self._held / self.kv_tokens
        return EngineCounters(
            len(self.running), len(self.waiting), self.preemptions, self.ended, usage
        )

    def step(self) -> float:
        """Run one step; return the seconds that it takes."""
        computed, held = 0, self._held
        while self.waiting and len(self.running) < self.max_num_seqs:
            first = self.waiting[0]
            if held + first.held > self.kv_tokens:
                break
            self.running.append(self.waiting.popleft())
            held += first.held
            computed += first.held
        while held + len(self.running) > self.kv_tokens:
            last = self.running.pop()
            held -= last.held
            self.waiting.appendleft(last)
            self.preemptions += 1
        for one in self.running:
            one.done += 1
            self.generated += 1
        batch = len(self.running)
        self.ended += sum(one.done >= one.answer for one in self.running)
        self.running = [one for one in self.running if one.done < one.answer]
        return self.base_s + batch * self.each_s + computed * self.prompt_s
