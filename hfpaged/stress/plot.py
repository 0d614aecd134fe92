"""The picture of a stress run: the pool and the memory over time."""

from __future__ import annotations

from hfpaged.picture import new_figure, save
from hfpaged.stress.facts import Facts
from hfpaged.stress.watch import FULL


def draw(path: str, facts: Facts, title: str) -> None:
    """Write a PNG."""
    figure = new_figure(9, 6)
    seconds = [sample.seconds for sample in facts.samples]
    pool, memory = figure.subplots(2, 1, sharex=True)
    total = max(facts.num_blocks, 1)
    pool.plot(seconds, [100 * sample.used / total for sample in facts.samples], label="in use")
    pool.plot(seconds, [100 * (sample.used + sample.cached) / total for sample in facts.samples], label="and cached")
    pool.axhline(100 * FULL, color="grey", linestyle=":", linewidth=1)
    pool.set(ylabel="pool, %", ylim=(0, 105), title=title)
    pool.legend(loc="lower right")
    memory.plot(seconds, [sample.resident / 2**20 for sample in facts.samples], label="resident")
    if any(sample.reserved for sample in facts.samples):
        memory.plot(seconds, [sample.reserved / 2**20 for sample in facts.samples], label="reserved on the device")
        memory.plot(seconds, [sample.allocated / 2**20 for sample in facts.samples], label="allocated there")
    memory.set(xlabel="seconds", ylabel="MiB")
    memory.legend(loc="lower right")
    save(figure, path)
