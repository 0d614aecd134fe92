"""`hfpaged serve --kv-events-endpoint`: flags, a server that is followed, and what its metrics say."""

from __future__ import annotations

import pytest
import serving
from kv_mirror import Subscriber, hashes_in
from metrics_figures import Figures
from served import served

from hfpaged import InvalidConfigError, cli, telemetry
from hfpaged.kv_events import KVEventsConfig
from hfpaged.serve import ServeOptions, command
from hfpaged.serve.launch import run

pytestmark = pytest.mark.usefixtures("one_thread")

FREE = "tcp://127.0.0.1:0"


def parsed(*words):
    return cli.build_parser(["serve"]).parse_args(["serve", *words])


def options(*words):
    return command.options_of(parsed(*words)).kv_events


def test_the_flags_are_the_fields_and_stand_above_the_json():
    assert options() is None
    assert options("--kv-events-endpoint", "tcp://*:1") == KVEventsConfig(endpoint="tcp://*:1")
    text = '{"enable_kv_cache_events": true, "topic": "a", "buffer_steps": 5}'
    assert options("--kv-events-config", text) == KVEventsConfig(topic="a", buffer_steps=5)
    both = options("--kv-events-config", text, "--kv-events-topic", "b", "--kv-events-replay-endpoint", "tcp://*:2")
    assert both == KVEventsConfig(topic="b", buffer_steps=5, replay_endpoint="tcp://*:2")
    assert options("--kv-events-config", '{"enable_kv_cache_events": false}') is None
    assert options("--kv-events-endpoint", "ipc:///tmp/x", "--kv-events-salted").salted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kv-events-topic", "x"], "none without --kv-events-endpoint"),
        (["--kv-events-endpoint", "tcp://*:1", "--no-prefix-caching"], "knows none; leave one of the two out"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(words, said):
    with pytest.raises(InvalidConfigError, match=said):
        options(*words)


def test_behind_replicas_no_router_outside_chooses(capsys):
    assert cli.main(["serve", "no-model", "--replicas", "2", "--kv-events-endpoint", "tcp://*:1"]) == 2
    assert "start each engine by itself" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--kv-events-endpoint=5557", "--kv-events-config={}x", '--kv-events-config={"a":1}'])
def test_what_is_no_endpoint_or_no_config_is_told_in_a_line(words, capsys):
    with pytest.raises(SystemExit) as end:
        parsed(words)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "write " in line


def test_a_taken_port_is_told_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr("hfpaged.serve.launch.load_model", None)
    taken = KVEventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="ipc:///no/such/folder/x")
    with pytest.raises(InvalidConfigError, match="cannot publish KV events at ipc:///no/such/folder/x: No such file"):
        run("no model", options=ServeOptions(kv_events=taken), port=0)


def test_a_server_is_followed_and_its_metrics_tell_how_many_events(tmp_path):
    at = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"
    events = KVEventsConfig(endpoint=at[0], replay_endpoint=at[1], topic="kv@pod@tiny")
    batcher = serving.tiny_batcher()
    with served(batcher, ServeOptions(kv_events=events)) as server, Subscriber(*at, "kv@") as router:
        server.wait_until(lambda: server.client.get("/ready").status_code == 200)
        for start in range(3, 8):
            prompt = list(range(start, start + 20))
            server.client.post(serving.PATH, json=serving.body(prompt, 10)).raise_for_status()
        salted = serving.body(list(range(50, 70)), 10, cache_salt="mine")
        server.client.post(serving.PATH, json=salted).raise_for_status()
        plain = {name for name in hashes_in(batcher.pool) if name not in salted_in(batcher.pool)}
        assert plain < hashes_in(batcher.pool)
        router.follow_until(lambda: plain)
        all_of_process = Figures(server.client.get("/metrics").text).by("hfpaged_kv_events_total", "event")
        figures = Figures(telemetry.metrics_text(batcher)).by("hfpaged_kv_events_total", "event")
    assert all_of_process.keys() == figures.keys()
    assert figures["stored"] - figures["removed"] == len(plain)
    assert (figures["cleared"], figures["dropped"]) == (1, 0)
    batcher.close()


def salted_in(pool):
    entries = pool.prefixes.index.entries()
    return {int.from_bytes(entry.digest[-8:], "big") for entry in entries if entry.root.value("salt") is not None}


def test_where_all_prompts_have_salts_it_is_said_that_nothing_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hfpaged.serve.launch.Server.run", lambda self, sockets: None)
    events = KVEventsConfig(endpoint=f"ipc://{tmp_path}/events")
    sizes = {"num_blocks": 16, "block_size": 4, "prepack": False}
    run(serving.tiny_model(), None, options=ServeOptions(api_keys={"a": "key"}, kv_events=events), port=0, **sizes)
    assert "--kv-events-salted tells them, token ids in clear" in capsys.readouterr().err
