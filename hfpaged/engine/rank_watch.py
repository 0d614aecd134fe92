"""Whether all ranks are there. One that is gone leaves the others waiting in the middle of a layer: on a GPU for many
minutes, and nobody would say why.

Rank 0 and each other one tell each other every second that they are there, in threads of their own:

    rank 0  <-- beat, fault, end -->  rank 1, rank 2, ...

A process that dies closes its connections, which is noticed at once; one that is stopped, or whose machine is gone,
falls silent. What goes wrong on one rank is told to all, and each says the same in its log.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from hfpaged.engine.plan_channel import end_group, new_group
from hfpaged.errors import RankLostError
from hfpaged.ranks import Ranks

logger = logging.getLogger("hfpaged")

BEAT, FAULT, END = range(3)
SIZE = 1024  # bytes of a message: its kind, and a text
EVERY = 1.0  # seconds between two beats
SILENT = 10.0  # seconds after which a silent rank is told of, and those after which it counts as gone
GONE = 300.0
LAST_WORDS = 3.0  # seconds in which a rank that was let go reads that
# Seconds that a rank gets to notice by itself that another one is gone. gloo raises; NCCL waits, and cannot be told.
GRACE = 10.0


class RankWatch:
    """Watches the ranks from this one. `fault`: why none of them can go on, None while all is well.
    `heard`: when each other rank was heard of last.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group = new_group(ranks)
        self.fault: str | None = None
        self._on_fault: list[Callable[[str], None]] = []
        self._fault_time = 0.0
        self._known = threading.Event()  # that there is a fault
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._num_busy = 0  # threads in something that needs the other ranks
        self._left: str | None = None  # which rank has come to its end too early, perhaps
        self._left_time = 0.0
        peers = range(1, ranks.size) if ranks.is_first else [0]
        self.heard = dict.fromkeys(peers, time.monotonic())
        self._silent: set[int] = set()
        self._ended_to: set[int] = set()  # to whom we have said that this is the end
        # A message to a rank that does not listen waits, and nothing else may wait for that.
        self._outboxes: dict[int, queue.SimpleQueue[bytes]] = {peer: queue.SimpleQueue() for peer in peers}
        works: list[Callable[[], None]] = [partial(work, peer) for peer in peers for work in (self._listen, self._send)]
        self._threads = [threading.Thread(target=work, daemon=True) for work in (*works, self._beat)]
        for thread in self._threads:
            thread.name = "hfpaged-ranks"
            thread.start()

    def check(self) -> None:
        """Raises RankLostError where no rank can go on."""
        if self.fault is None and self._left is not None:
            self.declare(self._left)
        if self.fault is not None:
            raise RankLostError(self.fault)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside the other ranks are needed. Whatever is raised there ends the group: RankLostError."""
        self.check()
        try:
            with self.waiting():
                yield
        except RankLostError:
            raise
        except BaseException as error:
            self.soon()
            self.declare(f"{self._ranks} failed in the middle of a step: {type(error).__name__}: {error}")
            assert self.fault is not None
            raise RankLostError(self.fault) from error

    def soon(self) -> str | None:
        """The fault, if there is one in a moment: that another rank is gone is noticed here too, with its number."""
        self._known.wait(2 * EVERY)
        return self.fault

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside this rank may wait for another one: where that is gone, and nothing wakes it, its process ends."""
        self._count_busy(1)
        try:
            yield
        finally:
            self._count_busy(-1)

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that needs the other ranks."""
        return self._num_busy > 0

    def when_lost(self, told: Callable[[str], None]) -> None:
        """Tell of a fault when it comes, or now if it has."""
        with self._lock:
            self._on_fault.append(told)
            fault = self.fault
        if fault is not None:
            told(fault)

    def declare(self, reason: str) -> None:
        """No rank can go on. The first reason counts, and all are told."""
        with self._lock:
            if self.fault is not None or self._is_over.is_set():
                return
            self.fault, self._fault_time, listeners = reason, time.monotonic(), list(self._on_fault)
        self._known.set()
        logger.error("%s: no rank of the group can go on", reason)
        for peer in self.heard:
            self._tell(peer, FAULT, reason)
        for told in listeners:
            told(reason)

    def close(self, seconds: float = 5.0) -> None:
        """This rank needs the others no more. All ranks must call it; one that comes first waits for the others."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        for peer in self.heard:
            self._say_end(peer)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        if not any(thread.is_alive() for thread in self._threads):
            end_group(self._ranks, self._group)

    def _count_busy(self, change: int) -> None:
        with self._lock:  # a warm-up tells of its end beside the step of another thread
            self._num_busy += change

    def _listen(self, peer: int) -> None:
        message = torch.zeros(SIZE, dtype=torch.uint8)
        while True:
            try:
                dist.recv(message, group=self._group, group_src=peer)
            except (RuntimeError, ValueError):
                if not self._is_over.is_set():
                    self.declare(f"rank {peer} of {self._ranks.size} has died: its connections are closed")
                return
            self.heard[peer] = time.monotonic()
            kind, text = int(message[0]), bytes(message[1:].tolist()).rstrip(b"\0").decode(errors="replace")
            if kind == FAULT:
                self.declare(text)
            elif kind == END:
                self._ended(peer)
                return

    def _ended(self, peer: int) -> None:
        self._say_end(peer)
        if not self._is_over.is_set():
            self._left_time = time.monotonic()
            self._left = (
                f"rank {peer} of {self._ranks.size} has come to the end of its program while others need it; every "
                "rank must make the same calls of generate(), or call follow(), until rank 0 calls close()"
            )

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._is_over.wait(EVERY):
            before, last = last, time.monotonic()
            for peer, outbox in self._outboxes.items():
                if outbox.empty():
                    self._tell(peer, BEAT)
            if last - before > SILENT / 2:  # this very process was stopped
                self.heard.update(dict.fromkeys(self.heard, last))
            self._look_for_silence(last)
            # At an ordinary end this rank is about to read that it is let go.
            if self._left is not None and self.is_busy and last - self._left_time > LAST_WORDS:
                self.declare(self._left)
            if self.fault is not None and self.is_busy and last - self._fault_time > GRACE:
                self._give_up()

    def _look_for_silence(self, now: float) -> None:
        for peer, heard in self.heard.items():
            if peer in self._ended_to or now - heard <= SILENT:
                self._silent.discard(peer)
            elif now - heard > GONE:
                self.declare(f"rank {peer} of {self._ranks.size} has not been heard of for {now - heard:.0f} s")
            elif peer not in self._silent:
                self._silent.add(peer)
                logger.error(
                    "rank %d of %d has not been heard of for %.0f s: it is stopped, or its machine cannot be reached; "
                    "all steps wait for it, for %.0f s at most", peer, self._ranks.size, now - heard, GONE,
                )  # fmt: skip

    def _give_up(self) -> None:
        """What waits for a rank that is gone cannot be woken: this process ends."""
        logger.critical("%s ends: it waits for another rank in vain: %s", self._ranks, self.fault)
        logging.shutdown()
        os._exit(1)

    def _say_end(self, peer: int) -> None:
        with self._lock:
            is_said = peer in self._ended_to
            self._ended_to.add(peer)
        if not is_said:
            self._tell(peer, END)

    def _tell(self, peer: int, kind: int, text: str = "") -> None:
        if kind == END or peer not in self._ended_to:
            self._outboxes[peer].put(bytes([kind]) + text.encode())

    def _send(self, peer: int) -> None:
        outbox, message = self._outboxes[peer], torch.zeros(SIZE, dtype=torch.uint8)
        while True:
            content = outbox.get()[:SIZE].ljust(SIZE, b"\0")
            message.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            try:
                dist.send(message, group=self._group, group_dst=peer)
            except (RuntimeError, ValueError):  # who listens to that rank notices too
                return
            if content[0] == END:
                return
