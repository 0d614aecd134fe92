"""hfpaged.watch: what it shows is what the pool holds, and whoever is watched never notices."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import os
import re
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref

import pytest
import rich
import tiny_models
import torch
from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress
from stub_batcher import StubBatcher

import hfpaged
from hfpaged import InvalidConfigError, PagedCache, live_display
from hfpaged.config import format_bytes
from hfpaged.watching.screen import PLAIN_SECONDS, NotebookScreen, drawn
from hfpaged.watching.source import source_of
from hfpaged.watching.view import HEADS
from hfpaged.watching.watch import Watch, make_watch
from hfpaged.watching.words import hits, rate

pytestmark = pytest.mark.usefixtures("one_thread", "nothing_left")

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
GREEDY = {"max_new_tokens": 6, "do_sample": False}
SOON = 10.0  # seconds, for what another thread does at once


@pytest.fixture
def nothing_left(monkeypatch):
    """No thread, no display and no stream of ours stays behind."""
    monkeypatch.setenv("TERM", "xterm-256color")
    streams = sys.stdout, sys.stderr
    yield
    assert until(lambda: "hfpaged-watch" not in [thread.name for thread in threading.enumerate()])
    left = dict(live_display._displays)
    live_display._displays.clear()
    assert not left
    assert (sys.stdout, sys.stderr) == streams


def until(condition):
    """Whether it came true in time."""
    end = time.monotonic() + SOON
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def terminal(width=200, **options):
    return Console(file=io.StringIO(), force_terminal=True, width=width, **options)


def file_console():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def written(console):
    """All that was written, without what moves the cursor and colours."""
    return ESCAPES.sub("", console.file.getvalue())


def shown_live(console, *words):
    """Whether a frame with these words came in time."""
    return until(lambda: all(word in written(console) for word in words))


class Clock:
    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cache():
    model = tiny_models.shared("llama")
    cache = PagedCache(model, block_size=4, num_blocks=64)
    yield cache
    hfpaged.unpatch(model)


@pytest.fixture
def batcher():
    batcher = StubBatcher("llama", block_size=4, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=16)
    yield batcher
    batcher.close()


def generate(cache, prompts=((5, 6, 7, 8, 9, 10, 11, 12, 13),), **arguments):
    ids = torch.tensor(prompts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return tiny_models.shared("llama").generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY | arguments
        )


def by_hand(clock, *watched, console=None):
    """A watch that looks when it is told to."""
    return make_watch([source_of(each) for each in watched], 0.5, console or file_console(), clock)


# What it shows.


def test_blocks_are_those_of_the_pools_statistics(cache, clock):
    watch = by_hand(clock, cache)
    generate(cache)
    other = PagedCache(tiny_models.shared("llama"), pool=cache.pool)
    generate(other, [[*range(5, 14), *range(20, 40)]])
    del other
    gc.collect()
    watch.look()
    (figures,) = watch.figures
    stats, now = cache.stats(), figures.now
    assert stats.blocks_cached > 0
    assert (now.blocks_total, now.blocks_used) == (stats.blocks_total, stats.blocks_used)
    assert (now.blocks_cached, now.blocks_free) == (stats.blocks_cached, stats.blocks_free)
    assert now.bytes_used == stats.blocks_used * cache.pool.storage.block_bytes
    assert figures.hit_rate == stats.prefix_hits / stats.prefix_queries > 0
    watch.stop()


def test_tokens_of_a_cache_are_those_that_its_forwards_stored(cache, clock):
    watch = by_hand(clock, cache)
    generate(cache, [range(5, 14), range(15, 24)])
    clock.time += 2
    watch.look()
    (figures,) = watch.figures
    assert (figures.prefill_tokens, figures.decode_tokens) == (2 * 9, 2 * 5)  # the last ones are never stored
    assert (figures.prefill_rate, figures.decode_rate) == (9.0, 5.0)
    assert figures.busy_seconds == 2
    watch.stop()


def test_what_came_before_the_watch_does_not_count(cache, clock):
    generate(cache)
    watch = by_hand(clock, cache)
    watch.look()
    (figures,) = watch.figures
    assert (figures.prefill_tokens, figures.decode_tokens, figures.hit_rate) == (0, 0, None)
    assert figures.peak_blocks == figures.now.blocks_used == 4
    watch.stop()


def test_a_batcher_tells_its_requests_and_tokens(batcher, clock):
    watch = by_hand(clock, batcher)
    for _ in range(10):
        batcher.add_request([5, 6, 7, 8, 9], **GREEDY)
    events = []
    batcher.hooks.append(events.append)
    for _ in range(3):
        batcher.step()
    clock.time += 0.5
    watch.look()
    now = watch.figures[0].now
    steps = [event for event in events if type(event).__name__ == "StepFinished"]
    assert (now.running, now.waiting) == (steps[-1].num_running, steps[-1].num_waiting)
    assert now.running + now.waiting == 10
    assert now.blocks_used == batcher.pool.stats().blocks_used > 0
    while batcher.has_work:
        batcher.step()
    watch.look()
    (figures,) = watch.figures
    steps = [event for event in events if type(event).__name__ == "StepFinished"]
    assert figures.prefill_tokens == sum(step.num_prefill_tokens for step in steps)
    assert figures.decode_tokens == 60
    assert (figures.now.ended, figures.now.running, figures.now.waiting) == (10, 0, 0)
    assert figures.now.preemptions == sum(step.preemptions for step in steps)
    assert figures.busy_seconds == sum(step.seconds for step in steps)
    assert figures.peak_blocks == max(step.blocks_used for step in steps) > figures.now.blocks_used == 0
    watch.stop()


def test_rates_are_those_of_the_last_seconds_and_go_down_to_nothing(batcher, clock):
    watch = by_hand(clock, batcher)
    batcher.generate([[5, 6, 7]], max_new_tokens=12, do_sample=False)
    clock.time += 1
    watch.look()
    assert watch.figures[0].decode_rate == 12
    clock.time += 1
    watch.look()
    assert watch.figures[0].decode_rate == 6
    for _ in range(4):
        clock.time += 1
        watch.look()
    assert (watch.figures[0].decode_rate, watch.figures[0].decode_tokens) == (0, 12)
    watch.stop()


def test_one_thing_is_a_line_with_a_bar_on_a_terminal(batcher, clock):
    console = terminal()
    watch = by_hand(clock, batcher, console=console)
    for number in range(6):
        batcher.add_request([5, 6, 7, 8, number], max_new_tokens=30, do_sample=False)
    for _ in range(12):
        batcher.step()
    clock.time += 0.5
    watch.look()
    stats, now = batcher.pool.stats(), watch.figures[0].now
    used = f"{stats.blocks_used} of 64 blocks used, {stats.blocks_free} free ({stats.blocks_cached} cached)"
    assert shown_live(console, used, f"{now.running} running {now.waiting} waiting")
    line = next(line for line in reversed(written(console).splitlines()) if used in line)
    assert line.startswith("batcher █")
    assert line.count("█") == max(round(20 * stats.blocks_used / 64), 1)
    assert f"{stats.blocks_used / 64:.0%}" in line
    watch.stop()


def test_several_things_are_a_table(cache, batcher, clock):
    console = terminal()
    watch = by_hand(clock, cache, batcher, cache.pool, copy.deepcopy(cache), console=console)
    generate(cache)
    clock.time += 1
    watch.look()
    assert shown_live(console, "prefill/s")
    generate(cache)
    rows = {line.split("  ")[0].strip(): line for line in written(console).splitlines() if line}
    assert {"cache 1", "cache 2", "batcher", "pool"} <= {name[:7].strip() for name in rows}
    watch.stop()
    assert written(console).count("watched for") == 4


def test_each_number_of_the_table_stands_below_its_word(cache, batcher, clock):
    watch = by_hand(clock, batcher, cache)
    for number in range(10):
        batcher.add_request([5, 6, 7, 8, number], max_new_tokens=30, do_sample=False)
    for _ in range(12):
        batcher.step()
    generate(cache)
    clock.time += 2
    watch.look()
    head, *rows = drawn(watch.figures).splitlines()
    for figures, row in zip(watch.figures, rows, strict=True):
        now = figures.now
        there = [now.blocks_used, now.blocks_free, now.blocks_cached, now.blocks_total]
        there += ["-"] * 2 if now.running is None else [now.running, now.waiting]
        there += [rate(figures.prefill_rate), rate(figures.decode_rate), hits(figures)]
        there += ["-" if now.preemptions is None else now.preemptions, format_bytes(now.bytes_used).replace(" ", "_")]
        name, _, *cells = row.replace("0 B", "0_B").replace(" KiB", "_KiB").split()
        assert name == figures.name
        assert cells == [str(each) for each in there]
    pool, *words = head.split()
    assert (pool, words) == ("pool", list(HEADS))
    assert len(words) == len(cells)
    for word in words[:4]:  # right-aligned
        assert rows[0][: head.index(word) + len(word)].split()[-1] == str(there_of(watch.figures[0])[word])
    watch.stop()


def there_of(figures):
    now = figures.now
    return {
        "used": now.blocks_used, "free": now.blocks_free, "cached": now.blocks_cached, "blocks": now.blocks_total,
    }  # fmt: skip


def test_nothing_is_lost_on_a_narrow_terminal(batcher, clock):
    console = terminal(width=40)
    watch = by_hand(clock, batcher, console=console)
    assert shown_live(console, "preempted", "0 B")
    watch.stop()


def test_a_console_without_unicode_gets_plain_signs(cache, clock):
    bytes_ = io.BytesIO()
    console = Console(
        file=io.TextIOWrapper(bytes_, encoding="ascii", write_through=True), force_terminal=True, width=200
    )
    watch = by_hand(clock, cache, console=console)
    generate(cache)
    watch.look()
    assert until(lambda: "#...." in ESCAPES.sub("", bytes_.getvalue().decode()))
    watch.stop()
    assert b"watched for" in bytes_.getvalue()


def test_a_pool_without_a_size_says_so(clock):
    pool = PagedCache(config=tiny_models.shared("llama").config).pool
    console = terminal()
    watch = by_hand(clock, pool, console=console)
    assert shown_live(console, "pool without a size before its first key")
    watch.stop()
    assert "peak 0 of 0 blocks (0%)" in written(console)


# Where there is no terminal.


def test_a_file_gets_a_line_now_and_then_and_a_last_one(batcher, clock):
    console = file_console()
    watch = by_hand(clock, batcher, console=console)
    batcher.generate([[5, 6, 7]], **GREEDY)
    for _ in range(5):
        clock.time += PLAIN_SECONDS / 2
        watch.look()
    lines = written(console).splitlines()
    assert len(lines) == 2
    assert all(line.startswith("batcher: 0% | 0 of 64 blocks used, ") for line in lines)
    watch.stop()
    last = written(console).splitlines()[-1]
    assert last.startswith("batcher: 1 request, 3 tokens prefilled, 6 decoded in ")
    assert last.endswith("0 preempted; watched for 25.0 s")
    assert "\x1b" not in console.file.getvalue()


def test_what_goes_to_a_file_is_not_mixed_with_what_the_program_prints(cache, capfd):
    with hfpaged.watch(cache):
        generate(cache)
        print("a result")
    out, err = capfd.readouterr()
    assert out == "a result\n"
    assert "9 tokens prefilled, 5 decoded" in err


def test_a_notebook_shows_one_output_anew(cache, clock, monkeypatch):
    outputs = []

    class Handle:
        def update(self, shown):
            outputs.append(shown)

    def display(shown, display_id):
        assert display_id is True
        outputs.append(shown)
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setattr("rich._console", types.SimpleNamespace(is_jupyter=True))
    watch = make_watch([source_of(cache)], 0.5, None, clock)
    assert isinstance(watch._screen, NotebookScreen)
    generate(cache)
    watch.look()
    assert "4 of 64 blocks used" in repr(outputs[-1])
    assert outputs[-1]._repr_html_().startswith("<pre>cache █")
    watch.stop()
    assert [("watched for" in repr(shown)) for shown in outputs] == [False, False, False, True]  # stop looks once more
    assert "\x1b" not in outputs[-2]._repr_html_()


# Beginning and end.


def test_it_is_a_context_and_leaves_a_last_line_with_totals(cache):
    console = terminal()
    with hfpaged.watch(cache, interval=0.01, console=console) as watch:
        generate(cache)
        assert shown_live(console, "4 of 64 blocks used")
        assert watch.is_running
    assert not watch.is_running
    last = written(console).splitlines()[-1]
    assert last.startswith("cache: 9 tokens prefilled, 5 decoded in ")
    assert "peak 4 of 64 blocks (6%), hits 0%; watched for" in last
    text = console.file.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


def test_it_can_be_stopped_by_hand_and_twice(cache):
    console = file_console()
    watch = hfpaged.watch(cache, console=console)
    assert repr(watch) == "Watch(cache, running)"
    watch.stop()
    watch.stop()
    assert repr(watch) == "Watch(cache, stopped)"
    assert written(console).count("watched for") == 1


def test_a_watched_cache_dies_when_it_is_dropped_and_ends_the_watch():
    model = tiny_models.shared("llama")
    cache = PagedCache(model, block_size=4, num_blocks=64)
    console = file_console()
    watch = hfpaged.watch(cache, cache.pool, interval=0.01, console=console)
    generate(cache)
    dead = weakref.ref(cache), weakref.ref(cache.pool)
    del cache
    gc.collect()
    assert until(lambda: not any(ref() for ref in dead))
    assert until(lambda: written(console).count("watched for") == 2)
    assert not watch.is_running
    assert "cache: 9 tokens prefilled, 5 decoded" in written(console)  # not less than there were
    hfpaged.unpatch(model)


def test_a_watched_batcher_dies_when_it_is_dropped():
    batcher = StubBatcher("llama", block_size=4, num_blocks=64)
    console = file_console()
    hfpaged.watch(batcher, interval=0.01, console=console)
    batcher.generate([[5, 6, 7]], **GREEDY)
    dead = weakref.ref(batcher)
    del batcher
    gc.collect()
    assert until(lambda: dead() is None)
    assert until(lambda: "1 request, 3 tokens prefilled, 6 decoded" in written(console))


def test_closing_a_batcher_ends_its_watch_and_takes_the_hook_away(batcher):
    others = list(batcher.hooks)
    console = file_console()
    hfpaged.watch(batcher, interval=0.01, console=console)
    assert len(batcher.hooks) == len(others) + 1
    batcher.close()
    assert until(lambda: "watched for" in written(console))
    assert until(lambda: batcher.hooks == others)


def test_one_of_several_may_end_while_the_others_go_on(cache, batcher, clock):
    watch = by_hand(clock, cache, batcher)
    batcher.close()
    assert watch.look()
    assert [figures.is_over for figures in watch.figures] == [False, True]
    clock.time += 1
    watch.look()
    assert [figures.seconds for figures in watch.figures] == [1.0, 0.0]
    watch.stop()


def test_stopping_takes_the_hook_away_and_no_other(batcher):
    others = list(batcher.hooks)
    with hfpaged.watch(batcher, console=file_console()), hfpaged.watch(batcher, console=file_console()):
        assert len(batcher.hooks) == len(others) + 2
    assert batcher.hooks == others


def test_a_hook_may_stop_the_watch_in_the_middle_of_a_step(batcher):
    console = file_console()
    watch = hfpaged.watch(batcher, interval=0.01, console=console)
    seen = []

    def stop(event):
        watch.stop()
        seen.append(event)

    batcher.hooks.append(stop)
    later = []
    batcher.hooks.append(later.append)
    batcher.generate([[5, 6, 7]], **GREEDY)
    assert len(later) == len(seen) > 5  # taking one hook away in a step keeps nothing from the others
    assert written(console).count("watched for") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_is_raised_inside_comes_out_and_the_terminal_is_left_in_order(cache, error):
    console = terminal()
    with pytest.raises(error), hfpaged.watch(cache, interval=0.01, console=console):  # noqa: PT012
        generate(cache)
        raise error
    assert "watched for" in written(console).splitlines()[-1]
    assert console.file.getvalue().count("\x1b[?25h") == 1


def test_a_program_that_never_stops_it_ends_with_the_last_line():
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "import hfpaged, tiny_models\n"
        "cache = hfpaged.PagedCache(tiny_models.shared('llama'), num_blocks=8)\n"
        "hfpaged.watch(cache)\n"
    )
    root = os.path.dirname(os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "cache: 0 tokens prefilled, 0 decoded, peak 0 of 8 blocks (0%)" in done.stderr


# It never gets in the way.


def test_it_does_not_wait_for_the_lock_of_the_pool(cache, clock):
    watch = by_hand(clock, cache)
    with cache.pool.changing():
        assert watch.look()
        watch.stop()


class Broken:
    def show(self, all_figures):
        raise OSError("no more room")

    finish = show


def test_an_error_of_its_own_goes_to_the_log_and_ends_it(batcher, caplog):
    others = list(batcher.hooks)
    whole = make_watch([source_of(batcher)], 0.01, file_console(), time.monotonic)
    watch = Watch(whole._trackers, Broken(), 0.01, time.monotonic)
    with caplog.at_level(logging.ERROR, logger="hfpaged"), watch.start():
        assert until(lambda: not watch.is_running)
        (output,) = batcher.generate([[5, 6, 7]], **GREEDY)
    assert len(output.token_ids) == 6
    assert "a watch failed and has ended" in caplog.text
    assert batcher.hooks == others


def test_a_closed_output_hurts_nobody(cache, caplog):
    console = file_console()
    with hfpaged.watch(cache, interval=0.01, console=console):
        console.file.close()
        generate(cache)
    assert "a watch could not show its end" in caplog.text


def test_prints_stand_above_and_redirected_ones_go_where_they_were_sent(cache, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    console = Console(file=out, force_terminal=True, width=200)
    inner = io.StringIO()
    watch = hfpaged.watch(cache, interval=0.01, console=console)
    print("above")
    with contextlib.redirect_stdout(inner):
        print("inner")
        watch.stop()
        print("inner too")
    assert sys.stdout.__class__.__name__ == "FileProxy"  # as redirect_stdout found it; it writes where it did
    assert sys.stdout.rich_proxied_file is out
    monkeypatch.undo()
    assert inner.getvalue() == "inner\ninner too\n"
    assert "above\n" in ESCAPES.sub("", out.getvalue())


# Several displays on one console.


@pytest.fixture
def shared_console(monkeypatch):
    """The console that rich gives to everybody."""
    console = terminal(width=240)
    monkeypatch.setattr("rich._console", console)
    monkeypatch.setattr(live_display, "_spare", [console])
    return console


def test_two_watches_are_shown_at_once(cache, batcher, shared_console):
    first = hfpaged.watch(cache, interval=0.01)
    second = hfpaged.watch(batcher, interval=0.01)
    frames = r"cache [█▒·]{20}.*\n+batcher [█▒·]{20}"
    assert until(lambda: re.search(frames, written(shared_console).replace("\r", "")))
    first.stop()  # the first one holds the console
    assert until(lambda: "cache: 0 tokens prefilled" in written(shared_console))
    place = len(shared_console.file.getvalue())
    assert until(lambda: "batcher ····" in ESCAPES.sub("", shared_console.file.getvalue()[place:]))
    second.stop()
    assert shared_console.file.getvalue().count("\x1b[?25l") == shared_console.file.getvalue().count("\x1b[?25h")


@pytest.mark.parametrize("inside", ["watch", "bar"])
def test_a_progress_bar_of_the_batcher_and_a_watch_are_shown_at_once(batcher, shared_console, inside):
    release = threading.Event()
    batcher.before_forward = lambda: release.wait(SOON)

    def run():
        batcher.generate([[5, 6, 7], [7, 8, 9]], progress=True, **GREEDY)

    def is_shown():
        text = written(shared_console)
        return bool(re.search("batcher [█·]", text)) and "prompts" in text

    thread = threading.Thread(target=run)
    if inside == "bar":
        with hfpaged.watch(batcher, interval=0.01):
            thread.start()
            assert until(is_shown)
            release.set()
            thread.join()
    else:
        thread.start()
        assert until(lambda: "prompts" in written(shared_console))
        with hfpaged.watch(batcher, interval=0.01):
            assert until(is_shown)
            release.set()
            thread.join()
    text = shared_console.file.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")
    assert "batcher: 2 requests" in written(shared_console)


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_bar_of_the_users_own_runs_inside_or_outside(batcher, shared_console, monkeypatch, is_inside):
    own = terminal()
    monkeypatch.setattr(live_display, "_spare", [own])  # used with a rich before 14.1
    bar = Progress(console=rich.get_console())
    with contextlib.ExitStack() as stack:
        for each in (True, False):
            stack.enter_context(bar if each != is_inside else hfpaged.watch(batcher, interval=0.01))
        task = bar.add_task("theirs", total=3)
        batcher.generate([[5, 6, 7]], progress=True, **GREEDY)
        bar.advance(task)
    assert "theirs" in written(shared_console)
    assert "batcher: 1 request" in written(shared_console) + written(own)


def test_where_a_console_has_room_for_one_display_only_the_watch_is_a_plain_line(batcher, shared_console, monkeypatch):
    def refuse(self, live):
        raise LiveError("Only one live display may be active at once")

    monkeypatch.setattr(Console, "set_live", refuse)
    with hfpaged.watch(batcher, interval=0.01):
        (output,) = batcher.generate([[5, 6, 7]], progress=True, **GREEDY)
    assert output.finished
    assert "batcher: 1 request, 3 tokens prefilled, 6 decoded" in written(shared_console)
    assert "█" not in written(shared_console)


@pytest.mark.parametrize("wrong", [5, "cache", None, torch.nn.Linear(1, 1)])
def test_what_cannot_be_watched_is_refused(wrong):
    with pytest.raises(InvalidConfigError, match="give a PagedCache, a ContinuousBatcher or a KVPool"):
        hfpaged.watch(wrong)


def test_nothing_and_no_time_are_refused(cache):
    with pytest.raises(InvalidConfigError, match="was given nothing"):
        hfpaged.watch()
    for interval in (0, -1, float("nan")):
        with pytest.raises(InvalidConfigError, match="use a number above 0"):
            hfpaged.watch(cache, interval=interval)


@pytest.mark.parametrize("interval", [0, -1.0, float("nan"), float("inf"), 1e300, "often", None])
def test_an_interval_that_no_clock_can_wait_is_refused_at_once(interval):
    cache = PagedCache(tiny_models.shared("llama"), num_blocks=9)
    with pytest.raises(InvalidConfigError, match="a watch looks every so many seconds"):
        hfpaged.watch(cache, interval=interval)
