"""Pairs of processes of which one dies, fails, hangs or leaves. Writes what became of each as JSON.

Each pair is forked from here, so that torch is imported once; nothing of it runs before.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from hfpaged.engine import plan_channel, rank_watch
from hfpaged.engine.rank_group import RankGroup
from hfpaged.errors import BatcherClosedError
from hfpaged.packed_plan import NOTHING, PackedInput, PackedPlan
from hfpaged.ranks import Ranks

FOLDER = Path(sys.argv[1])
PLAN = PackedPlan(PackedInput(np.arange(3), NOTHING, NOTHING, NOTHING), (), 3, 4)
LONG = PackedPlan(PackedInput(np.arange(10**5), NOTHING, NOTHING, NOTHING), (), 3, 4)


class Runner:
    """In the place of a model: a forward is one sum over all ranks."""

    def __init__(self):
        self.seen = []

    def follow(self, plan):
        self.seen.append(len(plan.given.token_ids))
        self.forward()

    def forward(self):
        dist.all_reduce(torch.ones(1))


def forward(group, runner, plan=PLAN):
    with group.lead(plan):
        runner.forward()


def killed(group, runner):
    if group.leads:
        return forward(group, runner)
    time.sleep(0.3)
    return os.kill(os.getpid(), signal.SIGKILL)


def leader_killed(group, runner):
    if group.leads:
        os.kill(os.getpid(), signal.SIGKILL)
    group.follow(runner)


def killed_in_vain(group, runner):
    """As on a GPU, where a sum waits for ever."""
    if not group.leads:
        os.kill(os.getpid(), signal.SIGKILL)
    with group.watch.busy():
        time.sleep(100)


def fails(group, runner):
    if group.leads:
        return forward(group, runner)

    def no_room():
        raise MemoryError("no room")

    runner.forward = no_room
    return group.follow(runner)


def stopped(group, runner):
    if group.leads:
        return forward(group, runner)
    return os.kill(os.getpid(), signal.SIGSTOP)


def killed_at_the_start(group, runner):
    """In the first forward, whose error is taken for something else."""
    with group.starting():
        if not group.leads:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            runner.forward()
        except RuntimeError as error:
            raise ValueError("this model cannot be computed") from error


def fails_at_the_start(group, runner):
    """One rank alone has no room for a pool, and the other waits in a forward for ever."""
    with group.starting():
        if not group.leads:
            raise MemoryError("no room")
        time.sleep(100)


def stopped_at_the_end(group, runner):
    if group.leads:
        return group.close()
    return os.kill(os.getpid(), signal.SIGSTOP)


def leaves(group, runner):
    if group.leads:
        time.sleep(1)
        forward(group, runner)


def leader_leaves(group, runner):
    if group.leads:
        forward(group, runner)
        return "left"
    group.follow(runner)
    return runner.seen


def leader_ends_in_a_thread(group, runner):
    """Its program ends while a thread of it makes a step, and the other rank waits, as on a GPU, for ever."""
    if group.leads:

        def step():
            with group.lead(PLAN):
                time.sleep(100)

        threading.Thread(target=step, daemon=True).start()
        time.sleep(0.5)
        return
    runner.forward = partial(time.sleep, 100)
    group.follow(runner)


def interrupted(group, runner):
    def call():
        with group.lead(PLAN):
            os.kill(os.getpid(), signal.SIGINT)
            runner.forward()

    with suppress(KeyboardInterrupt):
        group.together(runner, call)
        return "not interrupted"
    sums = group.together(runner, lambda: [forward(group, runner)])
    group.close()
    return sums


def of_all_lengths(group, runner):
    """A plan that is too long for the tensor, and others behind it; then another group of the same ranks."""

    def call():
        for plan in (PLAN, LONG, PLAN, LONG):
            forward(group, runner, plan)
        return {"told": "by rank 0"}

    found = group.together(runner, call)
    errors = []
    try:
        group.together(runner, lambda: 1 / 0)
    except ZeroDivisionError as error:
        errors.append(str(error))
    size = len(group.channel._numbers)
    if group.leads:
        group.close()
    else:
        group.follow(runner)
    other = RankGroup(group.ranks)
    again = other.together(runner, lambda: forward(other, runner))
    other.close()
    return [found, runner.seen, errors, size == plan_channel.MOST, again]


def follows_in_a_thread(group, runner):
    """And is closed meanwhile; whoever comes later is told."""
    told = []
    if group.leads:
        forward(group, runner)
        group.close()
    else:
        thread = threading.Thread(target=group.follow, args=(runner,))
        thread.start()
        group.follow(runner)
        thread.join()
        told = runner.seen
    try:
        group.together(runner, lambda: 0)
    except BatcherClosedError as error:
        told.append(str(error))
    return told


def two_groups(group, runner):
    """Two batchers of one model, in two threads of each rank: the sums of one are not those of the other."""
    sums = []
    runners = []
    for own in (group, RankGroup(group.ranks)):
        one = Runner()
        one.forward = partial(add, len(runners) + 1, sums)
        one.follow = lambda plan, one=one: one.forward()
        runners.append((own, one))

    def lead(own, one):
        for _ in range(20):
            forward(own, one)
        own.close()

    work = lead if group.leads else RankGroup.follow
    threads = [threading.Thread(target=work, args=pair) for pair in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(sums)


def add(number, sums):
    """As the layers of a forward do."""
    for _ in range(10):
        both = torch.full((1,), number)
        dist.all_reduce(both)
        time.sleep(0.001)
        sums.append(int(both) // number)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(killed, leader_killed, killed_in_vain, fails, stopped, stopped_at_the_end, leaves),
        *(leader_leaves, leader_ends_in_a_thread, interrupted, of_all_lengths),
        *(follows_in_a_thread, two_groups, killed_at_the_start, fails_at_the_start),
    )
}


def run(name, rank):
    """In a child: one of the two ranks."""
    log = os.open(FOLDER / f"{name}{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    rank_watch.EVERY = 0.2
    if name in ("killed_in_vain", "leader_ends_in_a_thread", "fails_at_the_start"):
        rank_watch.GRACE, rank_watch.LAST_WORDS = 1.0, 0.5
    if name.startswith("stopped"):
        rank_watch.SILENT, rank_watch.GONE, rank_watch.GRACE = 1.0, 2.0, 1.0
    dist.init_process_group("gloo", init_method=f"file://{FOLDER / name}", rank=rank, world_size=2)
    group = RankGroup(Ranks(rank, 2, dist.group.WORLD))
    try:
        gave = SCENARIOS[name](group, Runner())
        (FOLDER / f"{name}{rank}.json").write_text(json.dumps(gave))
    except BaseException:
        traceback.print_exc()
        return 3
    return 0


def started(name, rank):
    """The process id of a child that has a rank."""
    pid = os.fork()
    if not pid:
        sys.exit(run(name, rank))
    return pid


def main():
    children = {started(name, rank): (name, rank) for name in SCENARIOS for rank in range(2)}
    codes, deadline = {}, time.monotonic() + 60
    while len(codes) < len(children) - 2 and time.monotonic() < deadline:  # two are stopped
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.02)
    for pid in children.keys() - codes.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    told = {f"{name}{rank}": codes.get(pid, "no end") for pid, (name, rank) in children.items()}
    (FOLDER / "codes.json").write_text(json.dumps(told))


main()
