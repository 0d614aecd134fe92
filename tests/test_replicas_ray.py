"""`hfpaged serve --replicas` on a Ray cluster of two nodes, one of which is killed at the end. In the order that they
stand in: all of them use the same two replicas, since those take long to load, until one is killed and replaced.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import ray_cluster
import serve_models
from ray_cluster import wait_patiently
from replica_answers import normal
from replica_traffic import tell
from served import served, wait_until
from served_hits import hits, system_prompts

from hfpaged import ContinuousBatcher, demo_model
from hfpaged.serve import ServeOptions

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL_NAME = "tiny"
SIZES = {"num_blocks": 512, "max_num_seqs": 4}
POOL = "3MiB"  # which is as many blocks of this model
KEYS = {"a": "key-a", "b": "key-b"}


class Cluster:
    """Two nodes, two replicas, and a client for them."""

    def __init__(self, nodes, driver, url, folder):
        self.nodes, self.driver, self.url, self.folder = nodes, driver, url, folder
        self.client = self.new_client()

    def new_client(self, key="key-a"):
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=ray_cluster.PATIENCE)

    def replicas(self):
        return ray_cluster.replicas(self.client)

    def kill_node_of(self, replica):
        self.nodes.remove_node(self._node_of(replica), allow_graceful=False)

    def kill_process_of(self, replica):
        self._kill("Replica", self._node_of(replica))

    def kill_ingress(self):
        self._kill("Ingress", self.nodes.head_node)

    def _kill(self, deployment, node):
        raylet, name = psutil.Process(node.all_processes["raylet"][0].process.pid), f"ServeReplica:hfpaged:{deployment}"
        (process,) = (each for each in raylet.children() if name in " ".join(each.cmdline()))
        process.kill()

    def _node_of(self, replica):
        (row,) = (row for row in self.replicas() if row["replica"] == replica)
        (node,) = (node for node in self.nodes.worker_nodes if node.node_id == row["node"])
        return node


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = serve_models.save(tmp_path_factory.mktemp("model"))
    port = ray_cluster.free_port()
    words = [
        str(folder), "--served-model-name", MODEL_NAME, "--replicas", "2", "--min-replicas", "2", "--max-replicas", "3",
        "--port", str(port), "--kv-cache-memory", POOL, "--max-num-seqs", "4", "--api-key", "a=key-a", "--api-key",
        "b=key-b", "--device", "cpu",
    ]  # fmt: skip
    with (
        ray_cluster.one_at_a_time(),
        ray_cluster.two_nodes() as nodes,
        ray_cluster.driver(*words, "--address", nodes.address) as driver,
    ):
        driver.wait_for(r"ready: (http://\S+)/v1")
        yield Cluster(nodes, driver, f"http://127.0.0.1:{port}", folder)


@pytest.fixture(scope="module")
def one_process(cluster):
    """A server with the same model in this process."""
    model, tokenizer = demo_model.load(cluster.folder)
    options = ServeOptions(served_model_names=(MODEL_NAME,), api_keys=KEYS)
    with (
        ContinuousBatcher(model, tokenizer, **SIZES) as batcher,
        served(batcher, options, headers={"Authorization": "Bearer key-a"}) as found,
    ):
        yield found


def test_each_node_has_a_replica(cluster):
    rows = cluster.replicas()
    assert len({row["node"] for row in rows}) == len({row["replica"] for row in rows}) == 2
    assert all(row["ready"] and row["max_num_seqs"] == SIZES["max_num_seqs"] for row in rows)


STREAMS = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 24, "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "stream": True,
                             "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 24, "stream": True},
}  # fmt: skip


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_is_that_of_one_process(cluster, one_process, path):
    body = {**STREAMS[path], "temperature": 1.0, "seed": 7, "model": MODEL_NAME}
    answers = [client.post(path, json=body) for client in (cluster.client, one_process.client)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].headers["x-hfpaged-replica"] in {row["replica"] for row in cluster.replicas()}
    assert len(answers[0].headers.get_list("x-request-id")) == 1
    assert normal(answers[0]) == normal(answers[1])
    assert answers[0].text.count("data: ") > 5


def test_errors_are_those_of_one_process(cluster, one_process):
    for path, body, headers in (
        ("/v1/completions", b"{", {}),
        ("/v1/completions", b'{"prompt": "x", "model": "other"}', {}),
        ("/v1/completions", b'{"prompt": "x"}', {"Authorization": "Bearer wrong"}),
        ("/v1/completions", b" " * (1 << 20), {}),
        ("/nothing", b"", {}),
    ):
        answers = [client.post(path, content=body, headers=headers) for client in (cluster.client, one_process.client)]
        assert answers[0].status_code >= 400
        assert answers[0].status_code == answers[1].status_code
        assert answers[0].text == answers[1].text


def test_a_prefix_is_found_again_wherever_it_is_and_by_its_own_tenant_alone(cluster):
    body = {"prompt": "a prefix of several blocks " * 4, "max_tokens": 1}

    def cached(key):
        with cluster.new_client(key) as client:
            answer = client.post("/v1/completions", json=body)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("key-a") == 0
    # Sent on by what was sent before, or by what the replica has told since.
    assert all(cached("key-a") > 0 for _ in range(4))
    assert cached("key-b") == 0
    assert cached("key-b") > 0


@pytest.mark.parametrize("at_once", [1, 4])
def test_eight_system_prompts_hit_as_on_one_replica_and_much_more_than_in_turn(cluster, one_process, at_once):
    says = system_prompts(8, each=3, seed=at_once)
    bodies = [{"messages": each, "max_tokens": 2, "cache_salt": f"traffic {at_once}"} for each in says]
    # Two salts on one server, whose pool has room for all, hit as two replicas that are asked in turn.
    turns = [body | {"cache_salt": f"turn {at_once} {number % 2}"} for number, body in enumerate(bodies)]
    one, turn = (hits(one_process.client, each, at_once).rate for each in (bodies, turns))
    near, answered = hits(cluster.client, bodies, at_once)
    tell(f"8 system prompts on Ray Serve, {at_once} at once", one, near, turn)
    assert one > 0.55
    assert near >= 0.9 * one
    assert near >= 1.5 * turn
    assert len(answered) == 2
    assert min(answered.values()) >= len(bodies) / 6


def test_where_the_ingress_dies_another_one_comes_which_knows_prefixes_by_what_replicas_tell(cluster):
    """It has sent nothing, and remembers nothing."""
    bodies = [{"messages": each, "max_tokens": 2} for each in system_prompts(8, each=2, seed=9)]
    first = hits(cluster.client, bodies)
    cluster.kill_ingress()
    wait_patiently(lambda: cluster.client.get("/ready").status_code == 200)
    again = hits(cluster.client, bodies)
    assert again.rate > 0.9 > first.rate
    assert len(again.answered) == 2


def test_a_client_who_goes_is_noticed_in_the_replica(cluster):
    body = {"prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with cluster.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_patiently(lambda: all(row["running"] == row["waiting"] == 0 for row in cluster.replicas()))
    assert all(row["kv_use"] == 0 for row in cluster.replicas())
    aborted = re.findall(r"^hfpaged_requests_aborted_total\{.*\} (\S+)$", cluster.client.get("/metrics").text, re.M)
    assert sum(map(float, aborted)) >= 1


class Stream:
    """A client that reads an answer in a thread."""

    def __init__(self, cluster, number):
        self.replica, self.text = None, ""
        self.has_begun, self.error = threading.Event(), None
        self._body = {"prompt": f"Story {number}", "max_tokens": 200, "stream": True, "ignore_eos": True}
        self._cluster = cluster

    def read(self):
        with self._cluster.new_client() as client, client.stream("POST", "/v1/completions", json=self._body) as answer:
            assert answer.status_code == 200
            self.replica = answer.headers["x-hfpaged-replica"]
            for text in answer.iter_text():
                self.text += text
                self.has_begun.set()

    @property
    def ends_whole(self):
        return self.text.endswith("data: [DONE]\n\n")

    @property
    def ends_with_an_error(self):
        return '"code":"replica_lost"' in self.text.rpartition("\n\ndata: ")[2] and self.text.endswith("\n\n")


def test_more_replicas_are_asked_for_while_requests_queue(cluster):
    """A third one finds no CPU here: that it is asked for is what is seen."""
    waiting = [{"prompt": f"Queue {number}", "max_tokens": 100, "ignore_eos": True} for number in range(40)]
    with ThreadPoolExecutor(20) as threads:
        for _ in range(100):
            if cluster.driver.has_said(r"replicas: .*\b1 starting"):
                break
            for answer in threads.map(lambda body: cluster.client.post("/v1/completions", json=body), waiting):
                assert answer.status_code == 200
        else:
            pytest.fail("4,000 requests, 20 at a time where 8 can run, and no more replicas were asked for")


def check_that_little_is_lost(cluster, kill):
    """`kill` gets the replica of one of 16 streams, of which 8 have begun and 8 wait; returns its name."""
    streams = [Stream(cluster, number) for number in range(4 * SIZES["max_num_seqs"])]
    with ThreadPoolExecutor(len(streams)) as threads:
        reading = [threads.submit(stream.read) for stream in streams]
        wait_until(lambda: len({stream.replica for stream in streams if stream.has_begun.is_set()}) == 2,
                   ray_cluster.PATIENCE)  # fmt: skip
        begun = [stream for stream in streams if stream.has_begun.is_set() and not stream.ends_whole]
        victim = begun[0].replica
        kill(victim)
        for each in reading:
            each.result(ray_cluster.PATIENCE)  # no connection broke
    lost = [stream for stream in streams if stream.ends_with_an_error]
    assert all(stream.ends_whole != stream.ends_with_an_error for stream in streams)
    assert lost, "it was killed when all its answers were whole"
    assert all(stream.replica == victim for stream in lost)
    # As many as may run at once had begun; the others there, and those that came later, were answered by the other.
    assert len(lost) <= SIZES["max_num_seqs"]
    return victim


def test_when_a_process_is_killed_nothing_is_lost_that_had_not_begun_and_another_one_takes_its_place(cluster):
    victim = check_that_little_is_lost(cluster, cluster.kill_process_of)
    wait_patiently(lambda: len(cluster.replicas()) == 2)
    assert victim not in {row["replica"] for row in cluster.replicas()}


def test_when_a_node_is_killed_nothing_is_lost_that_had_not_begun_and_the_rest_ends_with_an_error(cluster):
    victim = check_that_little_is_lost(cluster, cluster.kill_node_of)
    answers = [cluster.client.post("/v1/completions", json={"prompt": f"After {n}", "max_tokens": 2}) for n in range(4)]
    assert {answer.status_code for answer in answers} == {200}
    assert victim not in {answer.headers["x-hfpaged-replica"] for answer in answers}


def test_ctrl_c_lets_a_request_end_and_takes_the_application_away(cluster):
    stream = Stream(cluster, "last")
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(stream.read)
        assert stream.has_begun.wait(ray_cluster.PATIENCE)
        assert cluster.driver.stop() == 0
        reading.result(ray_cluster.PATIENCE)
    assert stream.ends_whole
    assert cluster.driver.has_said("stopped: no request is left")
