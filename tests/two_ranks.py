"""Runs a script in several processes that make one gloo group on this machine, as torchrun does, for tests.

    run = two_ranks.once(tmp_path_factory, "tensor_parallel_worker.py", "llama")   # launched once for all tests
    tokens_of_rank_0, tokens_of_rank_1 = run.of("greedy")

The script ends with `two_ranks.report({"greedy": a_function, ...})`, which runs one case after the other and keeps what
each gives: tensors, numbers, texts, lists and dicts of them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked
import torch
from filelock import FileLock
from torch.distributed import PrefixStore, Store, TCPStore

TESTS = Path(__file__).parent
TIMEOUT = 400  # seconds for a whole launch, on a machine that has other things to do
GRACE = float(os.environ.get("RANKS_GRACE", 10))  # seconds that a rank which failed waits for the others


@dataclass
class Rank:
    """One process of a group; what it wrote is in a file, so that it never waits for a reader."""

    number: int
    process: forked.Process
    folder: Path
    values: dict[str, Any] = field(default_factory=dict)  # by case, of those that ended well
    failures: dict[str, str] = field(default_factory=dict)  # by case: the traceback

    @property
    def output(self) -> str:
        return (self.folder / f"rank{self.number}.log").read_text(errors="replace")

    def read_results(self) -> None:
        file = results_file(self.folder, self.number)
        if file.exists():
            self.values, self.failures = torch.load(file, weights_only=True)


def results_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


GLOO = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


def environment(folder: Path, store: TCPStore, rank: int, size: int) -> dict[str, str]:
    """What torchrun sets. The store is the launcher's, as torchrun's is: no port is guessed."""
    return (
        forked.shared_environment()
        | GLOO
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "RESULTS_FOLDER": str(folder),
        }
    )


@contextmanager
def started(folder: Path, script: str | Path, *arguments: str, size: int = 2, **variables: str) -> Iterator[list[Rank]]:
    """The ranks, running; none of them is left when the block ends, however it ends.

    `script` is a file beside this one, or "-m" with the name of a module as first argument. `variables` go to the
    environment of all ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = ["-m" if script == "-m" else str(TESTS / script), *arguments]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[Rank] = []
    try:
        for number in range(size):
            told = environment(folder, store, number, size) | variables
            process = forked.start(words, told, folder / f"rank{number}.log")
            ranks.append(Rank(number, process, folder))
        yield ranks
    finally:
        for rank in ranks:
            end(rank.process)
        for rank in ranks:
            rank.process.wait()
        del store  # it serves until here


def end(process: forked.Process, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process and to all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def wait(ranks: list[Rank], timeout: float = TIMEOUT, grace: float = 3) -> str | None:
    """Until all ranks are done: None. One that fails leaves the others `grace` seconds: then, and after `timeout`
    seconds, those that are left write where they are and are ended, and it is said why.
    """
    deadline, reason = time.monotonic() + timeout, f"the ranks {{}} were not done after {timeout} s"
    while running := [rank.number for rank in ranks if rank.process.poll() is None]:
        failed = [rank.number for rank in ranks if rank.process.poll()]
        if failed and "failed" not in reason:
            deadline = min(deadline, time.monotonic() + grace)
            reason = f"the ranks {failed} failed, and {{}} were still there after {grace} s"
        if time.monotonic() > deadline:
            stop(ranks)
            return reason.format(running)
        time.sleep(0.02)
    failed = {rank.number: rank.process.returncode for rank in ranks if rank.process.returncode}
    return f"exit codes by rank: {failed}" if failed else None


def stop(ranks: list[Rank]) -> None:
    """faulthandler writes where each rank is, and ends it."""
    for rank in ranks:
        end(rank.process, signal.SIGABRT)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and any(rank.process.poll() is None for rank in ranks):
        time.sleep(0.02)
    for rank in ranks:
        end(rank.process)
        rank.process.wait()


@dataclass
class Run:
    """A launch that is over."""

    ranks: list[Rank]
    fault: str | None  # why it did not end well

    def of(self, case: str) -> list[Any]:
        """What a case gave, by rank. Raises AssertionError where it did not end well on all of them."""
        if all(case in rank.values for rank in self.ranks):
            return [rank.values[case] for rank in self.ranks]
        told = [f"rank {rank.number}: {rank.failures.get(case, 'did not come to the end')}" for rank in self.ranks]
        raise AssertionError("\n".join([f"case {case!r}, {self.fault or 'all ranks ended'}", *told, self.output]))

    @property
    def output(self) -> str:
        return "\n".join(f"--- rank {rank.number} wrote:\n{rank.output}" for rank in self.ranks)

    def check(self) -> Run:
        """Raises AssertionError where a rank failed, or was not done in time."""
        assert not self.fault, f"{self.fault}\n{self.output}"
        return self


def run(
    folder: Path, script: str | Path, *arguments: str, size: int = 2, timeout: float = TIMEOUT, **variables: str
) -> Run:
    """Launch and wait. Never raises for what a rank does: `Run.of` and `Run.check` do."""
    with started(folder, script, *arguments, size=size, **variables) as ranks:
        fault = wait(ranks, timeout)
    for rank in ranks:
        rank.read_results()
    return Run(ranks, fault)


def once(tmp_path_factory: Any, script: str | Path, *arguments: str, size: int = 2, **variables: str) -> Run:
    """The same, but launched once for all tests that ask with these arguments, whichever worker of pytest-xdist they
    are in: to be called in a fixture of scope "module" or "session".
    """
    common = tmp_path_factory.getbasetemp()
    common = common.parent if "PYTEST_XDIST_WORKER" in os.environ else common
    name = "-".join(["ranks", Path(script).stem, *arguments, str(size), *variables.values()])
    folder = common / name.replace("/", "_")
    with FileLock(f"{folder}.lock"):
        if (folder / "done").exists():
            return _of_another_worker(folder, size)
        found = run(folder, script, *arguments, size=size, **variables)
        (folder / "done").write_text(found.fault or "")
    return found


def _of_another_worker(folder: Path, size: int) -> Run:
    ranks = [Rank(number, None, folder) for number in range(size)]  # type: ignore[arg-type]
    for rank in ranks:
        rank.read_results()
    return Run(ranks, (folder / "done").read_text() or None)


# What follows is for the scripts.


def report(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Run the cases in order, on every rank. A case that fails on all ranks, or behind its last exchange with them,
    lets the next ones run; else the group would wait for this rank, and it ends.
    """
    rank, size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(os.environ["RESULTS_FOLDER"])
    ends = _ends()
    values: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for name, case in cases.items():
        try:
            values[name] = case()
        except Exception:
            failures[name] = traceback.format_exc()
        torch.save((values, failures), results_file(folder, rank))
        ends.set(f"{name}/{rank}", "over")
        if name in failures and not _all_came(ends, [f"{name}/{other}" for other in range(size)]):
            sys.exit(f"case {name!r} failed on rank {rank} while another rank waits in it:\n{failures[name]}")
    sys.exit(1 if failures else 0)


def _ends() -> Store:
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore("ends of cases", store)


def _all_came(ends: Store, names: list[str]) -> bool:
    try:
        ends.wait(names, timedelta(seconds=GRACE))
    except RuntimeError:
        return False
    return True
