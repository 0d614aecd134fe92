"""Traffic with system prompts on several replicas in one process: blocks, queues and the choice are real, forwards cost
nothing, and time is counted in steps.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from stub_batcher import StubBatcher

from hfpaged.replicas.reporting import Reporter
from hfpaged.replicas.routing import Routing
from hfpaged.replicas.routing_hash import RoutingHash, keys_for

BLOCK = 4
SECRET = b"of the fleet"
STEP_SECONDS, REPORT_STEPS = 0.05, 20


@dataclass(frozen=True)
class Traffic:
    """`prompts` system prompts of `length` tokens, the first ones the more popular the larger `skew` is; each request
    has a question and an answer of its own.
    """

    prompts: int = 8
    length: int = 96
    skew: float = 0.0
    requests: int = 160
    per_step: float = 0.5
    seed: int = 0

    def arrivals(self):
        """(step, prompt) of each request."""
        rng = random.Random(self.seed)
        heads = [[3, 4] + [rng.randrange(3, 100) for _ in range(self.length - 2)] for _ in range(self.prompts)]
        weights = [1 / (rank + 1) ** self.skew for rank in range(self.prompts)]
        time = 0.0
        for _ in range(self.requests):
            time += rng.expovariate(self.per_step)
            question = [rng.randrange(3, 100) for _ in range(rng.randrange(4, 20))]
            yield int(time), rng.choices(heads, weights)[0] + question


class Fleet:
    """Replicas that share `blocks`. `ingresses` routers send to them in turn, or in turn to each replica (0)."""

    def __init__(self, replicas, blocks, ingresses=1, seed=0, **thresholds):
        self.batchers = {
            f"replica {number}": StubBatcher(
                num_blocks=blocks // replicas, block_size=BLOCK, max_num_seqs=16, max_num_batched_tokens=256
            )
            for number in range(replicas)
        }
        self.reporters = {name: Reporter(batcher, SECRET) for name, batcher in self.batchers.items()}
        self.hash, self.step = RoutingHash(SECRET), 0
        self.told = {name: {} for name in self.batchers}
        routers = [self._router(seed + number) for number in range(ingresses)]
        self._routers = itertools.cycle(routers or [None])
        self._turn = itertools.cycle(self.batchers)
        self.sent = dict.fromkeys(self.batchers, 0)

    def run(self, traffic):
        """Until all have their answers."""
        left = list(traffic.arrivals())[::-1]
        while left or any(batcher.has_work for batcher in self.batchers.values()):
            if self.step % REPORT_STEPS == 0:
                self.told = {name: reporter.stats() for name, reporter in self.reporters.items()}
            while left and left[-1][0] <= self.step:
                self._send(left.pop()[1])
            for batcher in self.batchers.values():
                batcher.step()
            self.step += 1
        for batcher in self.batchers.values():
            batcher.check_empty()
        return self

    @property
    def hit_rate(self):
        """Of the prompt tokens that all replicas were asked for, the share that was not computed."""
        stats = [batcher.pool.stats() for batcher in self.batchers.values()]
        return sum(each.prefix_hits for each in stats) / sum(each.prefix_queries for each in stats)

    def _router(self, seed):
        return Routing(clock=lambda: self.step * STEP_SECONDS, rng=random.Random(seed))

    def _send(self, prompt):
        router = next(self._routers)
        if router is None:
            name = next(self._turn)
        else:
            hashes = self.hash.chain(keys_for(None, None), prompt, BLOCK)
            name = router.choose(hashes, self.told, {n: len(b.loop.requests) for n, b in self.batchers.items()})[0]
            router.sent(hashes, name)
        self.sent[name] += 1
        self.batchers[name].add_request(prompt, max_new_tokens=8, do_sample=False)


def hit_rates(traffic, blocks, replicas=2, ingresses=1):
    """(of one replica with all blocks, of several by prefix, of several in turn)."""
    one = Fleet(1, blocks, 0).run(traffic)
    near = Fleet(replicas, blocks, ingresses).run(traffic)
    turn = Fleet(replicas, blocks, 0).run(traffic)
    tell(traffic, one.hit_rate, near.hit_rate, turn.hit_rate)
    return one, near, turn


def tell(traffic, one, near, turn):
    """For `pytest -s`: the README has these figures."""
    print(f"\n{traffic}: one replica {one:.1%}, by prefix {near:.1%}, in turn {turn:.1%}")
