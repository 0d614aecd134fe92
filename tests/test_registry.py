"""Hooks for all batchers of the process, in whatever order batchers and watchers come."""

from __future__ import annotations

import threading

import pytest
from test_batcher_tokens import batcher_of

from hfpaged.engine import registry

pytestmark = pytest.mark.usefixtures("one_thread")


def hook(event):
    pass


class Lock:
    """Lets somebody else in as soon as it is given back."""

    def __init__(self, others):
        self.others = others

    def __enter__(self):
        pass

    def __exit__(self, *error):
        others, self.others = self.others, lambda: None
        others()


def test_a_batcher_that_comes_while_watching_begins_has_one_hook(monkeypatch):
    def maker(batcher):
        return hook

    monkeypatch.setattr(registry, "_lock", Lock(lambda: registry.watch(maker)))
    batcher = batcher_of("llama")
    try:
        assert batcher.hooks.count(hook) == 1
    finally:
        registry.unwatch(maker)
    assert hook not in batcher.hooks
    batcher.close()


def test_a_batcher_that_comes_while_watching_ends_keeps_no_hook():
    def maker(batcher):
        if is_armed:
            ending.start()
            ending.join(0.2)  # it waits for its turn
        return hook

    is_armed = False
    ending = threading.Thread(target=lambda: registry.unwatch(maker))
    registry.watch(maker)
    is_armed = True
    batcher = batcher_of("llama")
    ending.join()
    assert hook not in batcher.hooks
    batcher.close()
