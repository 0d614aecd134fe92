"""The thread that publishes: it takes what has changed, some milliseconds' worth at a time, and sends it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import zmq

from hfpaged.kv_events.config import KVEventsConfig
from hfpaged.kv_events.feed import BlockFeed, Change, in_order
from hfpaged.kv_events.replay_buffer import Batch, ReplayBuffer
from hfpaged.kv_events.replay_server import ReplayServer
from hfpaged.kv_events.sockets import Sockets
from hfpaged.kv_events.wire import Wire, is_plain
from hfpaged.prefix_block import PrefixBlock

logger = logging.getLogger("hfpaged")

PAUSE = 0.005  # seconds in which the changes of a step come together
PAUSE_OF_FAILURE = 1.0
MOST_CHANGES = 4096  # of one batch


class Publisher:
    """Publishes what feeds tell, by medium, from `start` to `close`. They wake it by one event.

    endpoint, replay_endpoint    where its sockets are, with the ports that were free
    counts                       how many blocks it has told to be "stored" and "removed", how often that all is
                                 "cleared", and how many changes it had to drop ("dropped")
    """

    def __init__(
        self, feeds: Mapping[str, BlockFeed], wire: Wire, config: KVEventsConfig, counts: dict[str, int],
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.counts = counts
        for event in ("stored", "removed", "cleared", "dropped"):
            counts.setdefault(event, 0)
        self._feeds, self._wire, self._config, self._clock = feeds, wire, config, clock
        self._has_news = next(iter(feeds.values())).has_news
        self._sockets = Sockets(config)
        self.endpoint, self.replay_endpoint = self._sockets.endpoint, self._sockets.replay_endpoint
        self._topic, self._number = config.topic.encode(), 0
        # What those who follow know, by the hash of each block. Routers count how often one was stored.
        self._told: dict[str, dict[bytes, PrefixBlock]] = {medium: {} for medium in feeds}
        self._telling = threading.Lock()  # around `_told` and `_number`, which say the same to each replay
        self._buffer = ReplayBuffer(config.buffer_steps)
        self._replays: ReplayServer | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hfpaged-kv-events", daemon=True)

    def start(self) -> None:
        """All that is there is published first."""
        for feed in self._feeds.values():
            feed.start()
        self._thread.start()
        if self._sockets.replays is not None:
            topic = self._topic if self._config.schema == "map" else None
            self._replays = ReplayServer(self._sockets.replays, self._buffer, self._everything, topic)

    def close(self) -> None:
        """What has changed before is published, and the ports are free afterwards."""
        for feed in self._feeds.values():
            feed.stop()
        self._is_over.set()
        self._has_news.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._replays is not None:
            self._replays.close()
        self._sockets.close()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._has_news.wait()
            self._is_over.wait(PAUSE)
            self._has_news.clear()
            if not self._publish_news():
                self._is_over.wait(PAUSE_OF_FAILURE)
        self._publish_news()

    def _publish_news(self) -> bool:
        try:
            self._publish_changes()
        except Exception:
            logger.exception("some KV events were not published; all will be told anew")
            for feed in self._feeds.values():
                feed.fall_behind()
            return False
        return True

    def _publish_changes(self) -> None:
        self._count("dropped", sum(feed.take_dropped() for feed in self._feeds.values()))
        are_behind = [feed.take_behind() for feed in self._feeds.values()]
        if any(are_behind):  # one word clears all media
            self._clear()
            for medium, feed in self._feeds.items():
                there = feed.snapshot()
                for start in range(0, len(there), MOST_CHANGES):
                    self._tell(there[start : start + MOST_CHANGES], medium)
        for medium, feed in self._feeds.items():
            while changes := feed.take(MOST_CHANGES):
                self._tell(changes, medium)

    def _clear(self) -> None:
        with self._telling:
            for told in self._told.values():
                told.clear()
            self._send([self._wire.cleared()])
        self._count("cleared", 1)

    def _tell(self, changes: Iterable[Change], medium: str) -> None:
        with self._telling:
            news = [change for change in changes if self._is_told(change) and self._is_news(change, medium)]
            if news:
                self._send(self._wire.events(news, medium))
        stored = sum(change.is_there for change in news)
        self._count("stored", stored)
        self._count("removed", len(news) - stored)

    def _is_news(self, change: Change, medium: str) -> bool:
        told, name = self._told[medium], change.entry.digest
        was_there = name in told
        if change.is_there:
            told[name] = change.entry
        else:
            told.pop(name, None)
        return was_there != change.is_there

    def _count(self, event: str, more: int) -> None:
        self.counts[event] = self.counts.get(event, 0) + more

    def _send(self, events: list[object]) -> None:
        batch = Batch(self._number, self._wire.batch(self._clock(), events))
        self._number += 1
        if self._sockets.replays is not None:
            self._buffer.add(batch)  # first: who sees a gap by the next one finds this one
        self._sockets.events.send_multipart((self._topic, batch.number.to_bytes(8, "big"), batch.payload), zmq.NOBLOCK)

    def _everything(self) -> Batch:
        with self._telling:
            number = self._number - 1
            told = {medium: list(entries.values()) for medium, entries in self._told.items()}
        events = [self._wire.cleared()]
        for medium, entries in told.items():
            events += self._wire.events(in_order(entries), medium)
        return Batch(number, self._wire.batch(self._clock(), events))

    def _is_told(self, change: Change) -> bool:
        entry = change.entry
        return is_plain(entry) and (self._config.salted or entry.root.value("salt") is None)
