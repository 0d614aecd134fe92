"""What a scrape says, of real batchers and of plain generate(), through the whole way."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import tiny_models
import torch
from metrics_figures import Figures
from prometheus_client import CollectorRegistry, generate_latest
from transformers import StoppingCriteria, StoppingCriteriaList

import hfpaged
from hfpaged import ContinuousBatcher, InvalidConfigError, PagedCache, RequestTooLongError, kv_events
from hfpaged.telemetry import _prometheus, device_readings
from hfpaged.telemetry.catalog import BY_NAME, METRICS

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 6, "do_sample": False}
SCARCE = {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 16}


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    undo = _prometheus.install(registry)
    yield registry
    undo()


@pytest.fixture
def model(request):
    """Named after the test, so that no other one counts for it."""
    model = tiny_models.make("llama")
    model.config._name_or_path = request.node.name
    yield model
    hfpaged.unpatch(model)


def scraped(registry, model=None):
    return Figures(generate_latest(registry).decode(), None if model is None else model.config._name_or_path)


def batcher_of(model, **sizes):
    return ContinuousBatcher(model, prepack=False, **{"num_blocks": 100, "block_size": 4} | sizes)


def random_prompts(count, length=18, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny_models.VOCAB, (count, length), generator=generator).tolist()


def run_everything(model, folder):
    """All that a metric could be about happens; what must stay alive meanwhile."""
    batcher = batcher_of(model, **SCARCE, swap_space="1MiB", prefix_store=folder)
    with kv_events.publish(batcher, "tcp://127.0.0.1:*"):
        batcher.generate(random_prompts(6, 10), max_new_tokens=24, do_sample=False)
    assert batcher.tally.sums.numbers["hfpaged_preemptions_total",]
    with pytest.raises(RequestTooLongError):
        batcher.add_request([3] * 200, max_new_tokens=100)
    batcher.add_request([3, 4, 5], **GREEDY)
    batcher.step()
    batcher.abort(batcher.add_request([3, 4, 6], **GREEDY))
    cache = PagedCache(model, num_blocks=50)
    seen = {"output_attentions": True, "return_dict_in_generate": True}
    model.generate(**tiny_models.prompts([5, 7]), past_key_values=cache, **GREEDY, **seen)  # over the dense view
    shadowed = batcher_of(model, kv_dtype="int8", shadow=1.0)
    shadowed.generate(random_prompts(1), **GREEDY)
    return batcher, cache, shadowed


def test_a_scrape_has_all_metrics_of_the_catalog_and_no_other(registry, model, tmp_path):
    alive = run_everything(model, tmp_path)
    figures = scraped(registry, model)
    kinds = {"info": "gauge"}
    assert figures.types == {
        metric.name.removesuffix("_total" if metric.kind == "counter" else ""): kinds.get(metric.kind, metric.kind)
        for metric in METRICS
    }
    for metric in METRICS:
        suffix = "_count" if metric.kind == "histogram" else ""
        labels = [dict(labels) for name, labels in figures.samples if name == metric.name + suffix]
        assert all(set(each) == {"model_name", *metric.labels} for each in labels), metric.name
        assert any(each["model_name"] == model.config._name_or_path for each in labels), metric.name
    assert figures("hfpaged_dense_fallbacks_total", reason="output_attentions") > 0
    del alive


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not there: apt-get install -y --no-install-recommends prometheus",
)
def test_promtool_finds_nothing_wrong_with_a_scrape(registry, model, tmp_path):
    alive = run_everything(model, tmp_path)
    text = generate_latest(registry)
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    worse = subprocess.run(
        ["promtool", "check", "metrics"], input=text.replace(b"_seconds", b"_minutes"), capture_output=True, timeout=60
    )
    assert worse.returncode != 0  # it does look
    del alive


def test_importing_and_installing_loads_neither_torch_nor_transformers():
    code = (
        "import sys, prometheus_client; from hfpaged.telemetry import _prometheus, _otel_metrics;"
        "_prometheus.install(prometheus_client.CollectorRegistry()); _otel_metrics.install();"
        "assert _prometheus.families() == [], _prometheus.families();"
        "print(sorted({'torch', 'transformers', 'numba', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_text_is_that_of_the_families_and_of_one_batcher_only_its_own(model):
    mine, other = batcher_of(model), batcher_of(tiny_models.make("llama"))
    other.generate(random_prompts(1), **GREEDY)
    mine.generate(random_prompts(2), **GREEDY)
    text = Figures(_prometheus.metrics_text(mine))
    assert text.by("hfpaged_requests_received_total", "model_name") == {model.config._name_or_path: 2}
    families = Figures(_prometheus.families_of(mine))
    changing = "hfpaged_device_memory_bytes"
    assert {key: n for key, n in text.samples.items() if key[0] != changing} == {
        key: n for key, n in families.samples.items() if key[0] != changing
    }
    both = Figures(_prometheus.metrics_text())
    assert both.by("hfpaged_requests_received_total", "model_name").keys() >= {
        "LlamaForCausalLM",
        mine.tally.model_name,
    }


def test_two_batchers_of_one_model_are_added_up(registry, model):
    first, second = batcher_of(model, num_blocks=30, max_num_seqs=4), batcher_of(model, num_blocks=50, max_num_seqs=8)
    first.generate(random_prompts(2), **GREEDY)
    second.generate(random_prompts(3), **GREEDY)
    second.add_request([3] * 9, **GREEDY)
    second.step()
    figures = scraped(registry, model)
    assert figures("hfpaged_requests_received_total") == 6
    assert figures("hfpaged_request_duration_seconds_count") == 5
    assert figures("hfpaged_kv_blocks") == 80
    assert figures("hfpaged_kv_usage_ratio") == 3 / 50  # of the fuller one
    assert figures("hfpaged_engine_limit", limit="max_num_seqs") == 12
    assert figures("hfpaged_engine_limit", limit="max_model_len") == 256
    assert figures("hfpaged_requests_running") == 1


def test_batchers_on_one_pool_count_its_blocks_once(registry, model):
    first = batcher_of(model, num_blocks=40)
    second = ContinuousBatcher(model, pool=first.pool, prepack=False)
    second.generate(random_prompts(1), **GREEDY)
    assert scraped(registry, model)("hfpaged_kv_blocks") == 40


def test_no_counter_goes_back_when_batchers_and_pools_are_dropped(registry, model, tmp_path):
    def counters():
        found = scraped(registry, model)
        counting = {metric.name for metric in METRICS if metric.kind == "counter"}
        ends = ("_count", "_sum", "_bucket")  # of histograms
        return {key: n for key, n in found.samples.items() if key[0] in counting or key[0].endswith(ends)}

    before, alive = {}, run_everything(model, tmp_path)
    for dropping in ("nothing", "the batcher", "all", "all"):
        if dropping == "the batcher":
            alive = alive[1:]
        elif dropping == "all":
            alive = run_everything(model, tmp_path) if alive is None else None
        gc.collect()
        now = counters()
        assert before.keys() <= now.keys()
        assert all(now[key] >= value for key, value in before.items()), dropping
        before = now
    evicted = ("hfpaged_kv_evicted_blocks_total", frozenset({"model_name": model.config._name_or_path}.items()))
    assert before[evicted] > 0
    assert scraped(registry, model)("hfpaged_requests_received_total") == 20


def test_requests_of_a_batcher_that_is_dropped_are_aborted_ones(registry, model):
    batcher = batcher_of(model)
    batcher.add_request([3] * 9, **GREEDY)
    batcher.step()
    batcher.add_request([3] * 5, **GREEDY)  # nobody has seen it yet
    del batcher
    gc.collect()
    figures = scraped(registry, model)
    assert figures("hfpaged_requests_received_total") == figures("hfpaged_requests_aborted_total") == 2
    assert figures("hfpaged_request_output_tokens_sum") == 1
    assert figures("hfpaged_request_duration_seconds_count") == 2
    assert figures("hfpaged_requests_running") == figures("hfpaged_requests_waiting") == 0
    assert "hfpaged_kv_blocks" not in figures.names
    assert figures("hfpaged_prefix_queried_tokens_total") == 9


def test_a_closed_batcher_still_counts_and_has_no_limits(registry, model):
    batcher = batcher_of(model)
    batcher.add_request([3] * 9, **GREEDY)
    batcher.step()
    batcher.close()
    with pytest.raises(hfpaged.BatcherClosedError):
        batcher.add_request([3])
    figures = scraped(registry, model)
    assert figures("hfpaged_requests_aborted_total") == 1
    assert figures("hfpaged_requests_rejected_total", reason="closed") == 1
    assert figures("hfpaged_requests_received_total") == 2
    assert "hfpaged_engine_limit" not in figures.names


def test_pools_that_have_seen_no_key_and_caches_of_a_config_are_fine(registry, model):
    cache = PagedCache(model)  # sized by memory that is looked at when the first key comes
    nameless = PagedCache(config=model.config, num_blocks=7)
    figures = scraped(registry, model)
    assert figures("hfpaged_kv_blocks") == figures("hfpaged_kv_usage_ratio") == 0
    assert scraped(registry)("hfpaged_kv_blocks", model_name="unnamed") == 7
    del cache, nameless


def test_what_is_tried_out_while_a_batcher_is_made_is_no_pool_of_anybody(registry, model):
    seen = []
    with mock.patch(
        "hfpaged.engine.trial.are_close", side_effect=lambda *args: seen.append(scraped(registry, model)) or True
    ):
        batcher = batcher_of(model, num_blocks=40)
    assert seen
    assert {each("hfpaged_kv_blocks") for each in seen} == {40}
    assert batcher.pool.num_blocks == 40


def test_blocks_of_layer_groups_bytes_and_slots_are_those_of_the_pool(registry):
    model = tiny_models.make("gpt_oss")
    model.config._name_or_path = "groups"
    batcher = batcher_of(model, num_blocks=80)
    batcher.generate(random_prompts(2), **GREEDY)
    batcher.add_request(random_prompts(1, 18, seed=3)[0], **GREEDY)
    batcher.step()
    figures, pool = scraped(registry, model), batcher.pool
    stats, storage = pool.stats(), pool.storage
    assert figures.by("hfpaged_kv_blocks", "state")["used"] == stats.blocks_used
    by_group = {
        (dict(labels)["layer_group"], dict(labels)["state"]): n
        for (name, labels), n in figures.samples.items()
        if name == "hfpaged_kv_group_blocks"
    }
    assert {key: n for key, n in by_group.items() if key[1] == "used"} == {
        ("full", "used"): 5,
        ("window_12", "used"): 4,  # the first block has left the window
    }
    index = pool.prefixes.index
    cached = [index._holder[block][1] for block in pool.blocks.cached]
    names = {number: "full" if group.window is None else "window_12" for number, group in enumerate(pool.groups)}
    for number, name in names.items():
        assert by_group[name, "cached"] == cached.count(number)
    sizes = figures.by("hfpaged_kv_bytes", "kind")
    assert sizes == {
        "capacity": 80 * storage.block_bytes,
        "reserved": storage.nbytes,
        "live": stats.bytes_live,
        "wasted": stats.blocks_used * storage.block_bytes - stats.bytes_live,
    }
    unfilled = figures("hfpaged_kv_unfilled_slots")
    assert unfilled == 9 * 4 - (18 + 14)
    assert figures("hfpaged_kv_unfilled_ratio") == unfilled / 36 == pytest.approx(stats.waste_ratio)
    assert figures("hfpaged_kv_tokens") == 16
    assert figures("hfpaged_kv_pool_info", kv_format="auto", block_size="4", num_blocks="80", layer_groups="2") == 1
    hfpaged.unpatch(model)


def test_shared_blocks_are_counted_once_and_told(registry, model):
    batcher = batcher_of(model)
    batcher.add_request([7] * 17, do_sample=True, n=3, max_new_tokens=9, seed=1)
    batcher.step()
    batcher.step()
    figures = scraped(registry, model)
    assert figures("hfpaged_kv_shared_blocks") == 4
    assert figures("hfpaged_kv_blocks", state="used") == 4 + 3
    assert figures("hfpaged_kv_tokens") == 16 + 3 * 2
    assert figures("hfpaged_requests_running") == 1
    batcher.close()


def test_random_prompts_have_no_hit_however_often_they_are_preempted(registry, model):
    batcher = batcher_of(model, **SCARCE)
    batcher.generate(random_prompts(8, 10), max_new_tokens=30, do_sample=False)
    figures = scraped(registry, model)
    assert figures("hfpaged_preemptions_total") >= 4
    assert figures("hfpaged_prefix_hit_tokens_total") == 0
    assert figures("hfpaged_prefix_queried_tokens_total") == 8 * 10
    assert figures("hfpaged_prefix_lookups_total", reason="never_seen") == 8


def test_a_request_that_waits_for_fifty_steps_is_looked_up_once(registry, model):
    batcher = batcher_of(model, num_blocks=24)
    batcher.add_request(random_prompts(1, 8)[0], max_new_tokens=80, do_sample=False)
    for _ in range(40):
        batcher.step()
    batcher.add_request(random_prompts(1, 60, seed=1)[0], **GREEDY)
    for _ in range(38):
        batcher.step()
    assert scraped(registry, model)("hfpaged_requests_waiting") == 1
    assert scraped(registry, model)("hfpaged_prefix_queried_tokens_total") == 8
    while batcher.has_work:
        batcher.step()
    figures = scraped(registry, model)
    assert figures("hfpaged_prefix_queried_tokens_total") == 8 + 60
    assert figures("hfpaged_wait_seconds_total", cause="blocks") > 0


def test_too_short_to_be_shared_and_nothing_to_share_look_different(registry, model):
    batcher = batcher_of(model, block_size=16, num_blocks=20)
    shared = random_prompts(1, 15)[0]
    batcher.generate([shared], max_new_tokens=1)
    batcher.generate([shared], max_new_tokens=1)  # the same, and no block is full
    batcher.generate([random_prompts(1, 40, seed=5)[0]], max_new_tokens=1)
    reasons = scraped(registry, model).by("hfpaged_prefix_lookups_total", "reason")
    assert {reason: n for reason, n in reasons.items() if n} == {"below_block_size": 2, "never_seen": 1}


def test_a_repeated_prompt_hits_and_a_collision_of_hashes_never_does(registry, model):
    batcher = batcher_of(model)
    prompt, other = random_prompts(2, 21)
    batcher.generate([prompt], max_new_tokens=1)
    batcher.generate([prompt], max_new_tokens=1)
    figures = scraped(registry, model)
    assert figures("hfpaged_prefix_hit_tokens_total") == 20
    assert figures("hfpaged_prefix_lookups_total", reason="complete") == 1
    assert figures("hfpaged_prefix_hash_collisions_total") == 0
    batcher.pool.prefixes.index._hash = lambda data: next(iter(batcher.pool.prefixes.index.roots[0].children))
    batcher.generate([other], max_new_tokens=1)
    figures = scraped(registry, model)
    assert figures("hfpaged_prefix_hash_collisions_total") > 0
    assert figures("hfpaged_prefix_hit_tokens_total") == 20


def test_scrapes_hold_together_while_the_engine_runs_in_another_thread(registry, model):
    batcher = batcher_of(model, **SCARCE)
    going, errors, counts = True, [], []

    def scrape():
        last = {}
        while going:
            try:
                figures = scraped(registry, model)
                parts = ("finished_total", "aborted_total", "rejected_total", "running", "waiting")
                in_parts = sum(figures(f"hfpaged_requests_{part}") for part in parts)
                assert figures("hfpaged_requests_received_total") == in_parts
                assert figures("hfpaged_kv_blocks") == 24
                assert figures("hfpaged_requests_running") >= 0
                now = {key: n for key, n in figures.samples.items() if key[0].endswith(("_total", "_count", "_bucket"))}
                assert all(now[key] >= n for key, n in last.items())
                last = now
                counts.append(figures("hfpaged_requests_running"))
            except Exception as error:  # told in the thread of the test
                errors.append(error)
                return

    thread = threading.Thread(target=scrape)
    thread.start()
    with batcher.running() as engine:
        for number in range(6):
            for prompt in random_prompts(6, seed=number):
                batcher.add_request(prompt, **GREEDY)
            with pytest.raises(RequestTooLongError):
                batcher.add_request([3] * 200, max_new_tokens=100)
        assert engine is not None
        while batcher.has_work and not errors:
            time.sleep(0.01)
    going = False
    thread.join()
    assert not errors, errors
    assert max(counts) > 0  # it was asked while requests ran
    figures = scraped(registry, model)
    assert figures("hfpaged_requests_received_total") == 42
    assert figures("hfpaged_request_duration_seconds_count") == 36


def test_two_threads_that_generate_on_one_pool_are_all_counted(registry, model):
    first = PagedCache(model, num_blocks=200)
    caches = [first, PagedCache(model, pool=first.pool)]

    def generate(cache, seed):
        for number in range(3):
            cache.reset()
            prompt = torch.tensor(random_prompts(1, 9, seed=10 * seed + number))
            model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, **GREEDY)

    threads = [threading.Thread(target=generate, args=pair) for pair in zip(caches, (1, 2), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    figures = scraped(registry, model)
    assert figures("hfpaged_generate_calls_total", outcome="finished") == 6
    assert figures.by("hfpaged_generate_tokens_total", "kind") == {"prompt": 54, "cached": 0, "output": 36}
    assert figures("hfpaged_generate_running") == 0
    assert figures("hfpaged_generate_duration_seconds_count") == 6
    assert figures("hfpaged_generate_time_to_first_token_seconds_count") == 6
    assert figures("hfpaged_kv_blocks", state="used") == 2


def test_generate_tells_of_calls_under_way_of_failed_ones_and_of_what_was_cached(registry, model):
    cache = PagedCache(model, num_blocks=50, block_size=4)
    seen = []

    class Looking(StoppingCriteria):
        def __init__(self, error=None):
            self.error = error

        def __call__(self, input_ids, scores, **kwargs):
            seen.append(scraped(registry, model)("hfpaged_generate_running"))
            if self.error is not None:
                raise self.error
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def generate(**looking):
        given = {"past_key_values": cache, "stopping_criteria": StoppingCriteriaList([Looking(**looking)])}
        model.generate(**tiny_models.prompts([12]), **given, **GREEDY)
        cache.reset()

    generate()
    generate()
    with pytest.raises(ValueError, match="broken"):
        generate(error=ValueError("broken"))
    figures = scraped(registry, model)
    assert set(seen) == {1}
    assert figures.by("hfpaged_generate_calls_total", "outcome") == {"finished": 2, "error": 1}
    assert figures("hfpaged_generate_tokens_total", kind="cached") == 11 + 11
    assert figures("hfpaged_generate_duration_seconds_count") == 3
    assert figures("hfpaged_generate_running") == 0
    assert figures("hfpaged_prefix_hit_tokens_total") == 22


def test_device_memory_and_weights_are_told_beside_the_pool(registry, model):
    batcher = batcher_of(model)
    figures = scraped(registry, model)
    weights = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert figures("hfpaged_model_weights_bytes", device="cpu") == weights
    memory = {
        kind: figures("hfpaged_device_memory_bytes", kind=kind, device="cpu")
        for kind in ("total", "free", "allocated", "peak")
    }
    assert weights < memory["allocated"] <= memory["peak"] < memory["total"]
    assert 0 < memory["free"] < memory["total"]
    del batcher


def test_of_a_gpu_all_five_kinds_of_memory_are_told(monkeypatch):
    answers = {"mem_get_info": (10, 80), "memory_reserved": 60, "memory_allocated": 50, "max_memory_allocated": 55}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    found = device_readings.memory_of(torch.device("cuda", 1))
    assert found == {"total": 80, "free": 10, "reserved": 60, "allocated": 50, "peak": 55}
    assert device_readings.memory_of(torch.device("meta")) == {}


def test_undoing_leaves_nothing_behind(model):
    registry = CollectorRegistry()
    undo = _prometheus.install(registry)
    batcher = batcher_of(model)
    hooks = list(batcher.hooks)
    assert scraped(registry, model).names
    undo()
    assert not scraped(registry, model).names
    assert batcher.hooks == hooks == [batcher.tally]
    assert not hfpaged.generation_events.is_watched()
    undo = _prometheus.install(registry)  # and it can be done again
    assert scraped(registry, model).names
    undo()


def test_what_was_counted_of_generate_does_not_go_back_by_looking_away(model):
    registry = CollectorRegistry()
    for number in (1, 2):
        undo = _prometheus.install(registry)
        model.generate(**tiny_models.prompts([5]), past_key_values=PagedCache(model, num_blocks=9), **GREEDY)
        assert scraped(registry, model)("hfpaged_generate_calls_total") == number
        undo()


def test_an_unknown_compatibility_is_refused_and_nothing_is_installed():
    registry = CollectorRegistry()
    with pytest.raises(InvalidConfigError, match="metrics_compat='sglang' is not known; use vllm"):
        _prometheus.install(registry, metrics_compat="sglang")
    assert not list(registry.collect())
    assert not hfpaged.generation_events.is_watched()


# Of vLLM 0.32: what dashboards, AIPerf, routers and scalers read, and the metric of ours that it is, if it is one.
VLLM = {
    "vllm:num_requests_running": "hfpaged_requests_running",
    "vllm:num_requests_waiting": "hfpaged_requests_waiting",
    "vllm:kv_cache_usage_perc": "hfpaged_kv_usage_ratio",
    "vllm:prefix_cache_queries_total": "hfpaged_prefix_queried_tokens_total",
    "vllm:prefix_cache_hits_total": "hfpaged_prefix_hit_tokens_total",
    "vllm:gpu_cache_usage_perc": "hfpaged_kv_usage_ratio",
    "vllm:gpu_prefix_cache_queries_total": "hfpaged_prefix_queried_tokens_total",
    "vllm:gpu_prefix_cache_hits_total": "hfpaged_prefix_hit_tokens_total",
    "vllm:time_per_output_token_seconds_sum": "hfpaged_inter_token_latency_seconds_sum",
    "vllm:num_preemptions_total": "hfpaged_preemptions_total",
    "vllm:prompt_tokens_total": "hfpaged_prompt_tokens_total",
    "vllm:generation_tokens_total": "hfpaged_generated_tokens_total",
    "vllm:time_to_first_token_seconds_count": "hfpaged_time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_sum": "hfpaged_inter_token_latency_seconds_sum",
    "vllm:request_time_per_output_token_seconds_sum": "hfpaged_time_per_output_token_seconds_sum",
    "vllm:e2e_request_latency_seconds_sum": "hfpaged_request_duration_seconds_sum",
    "vllm:request_queue_time_seconds_sum": "hfpaged_request_queue_seconds_sum",
    "vllm:request_prompt_tokens_sum": "hfpaged_request_prompt_tokens_sum",
    "vllm:request_generation_tokens_sum": "hfpaged_request_output_tokens_sum",
    "vllm:iteration_tokens_total_sum": "hfpaged_computed_tokens_total",
    "vllm:num_requests_waiting_by_reason": "hfpaged_requests_waiting",
    "vllm:prompt_tokens_by_source_total": "hfpaged_prompt_tokens_total",
    "vllm:prompt_tokens_cached_total": "hfpaged_prefix_hit_tokens_total",
    "vllm:request_success_total": None,
    "vllm:request_prefill_time_seconds_count": "hfpaged_time_to_first_token_seconds_count",
    "vllm:request_decode_time_seconds_count": "hfpaged_time_to_first_token_seconds_count",
    "vllm:request_inference_time_seconds_count": "hfpaged_request_duration_seconds_count",
    "vllm:cache_config_info": None,
}


def test_the_same_numbers_stand_under_the_names_of_vllm(model):
    registry = CollectorRegistry()
    undo = _prometheus.install(registry, metrics_compat="vllm")
    batcher = batcher_of(model, **SCARCE)
    batcher.generate(random_prompts(6), **GREEDY)
    batcher.generate(random_prompts(1, seed=9) * 2, **GREEDY)
    batcher.abort(batcher.add_request([3, 4], **GREEDY))
    (first, *_) = random_prompts(3, seed=7)
    batcher.add_request(first, **GREEDY)
    batcher.step()
    waiting = [
        batcher.add_request(prompt, max_new_tokens=40, do_sample=False) for prompt in random_prompts(4, 30, seed=8)
    ]
    batcher.step()
    figures = scraped(registry, model)
    assert all(dict(labels)["engine"] == "0" for name, labels in figures.samples if name.startswith("vllm:"))
    for theirs, ours in VLLM.items():
        if (
            ours is not None
            and "prefill_time" not in theirs
            and "decode_time" not in theirs
            and "inference" not in theirs
        ):
            assert figures(theirs) == pytest.approx(figures(ours)), theirs
        assert figures(theirs) >= 0
    bare = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in figures.names}
    theirs = {name.removesuffix("_count").removesuffix("_sum") for name in VLLM}
    assert {name for name in bare if name.startswith("vllm:")} == theirs
    assert figures("vllm:request_success_total", finished_reason="length") == 8
    assert figures("vllm:request_success_total", finished_reason="abort") == 1
    assert figures("vllm:num_requests_waiting") > 0
    assert figures("vllm:num_requests_waiting_by_reason", reason="capacity") > 0
    assert figures("vllm:prompt_tokens_by_source_total", source="local_cache_hit") > 0
    assert figures("vllm:cache_config_info", block_size="4", num_gpu_blocks="24", cache_dtype="auto") == 1
    for name in ("vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"):
        assert figures(f"{name}_count") == 8  # of ended ones that had a token
    assert figures("vllm:request_inference_time_seconds_count") == 8
    for name in waiting:
        batcher.abort(name)
    undo()


def test_who_waits_for_a_prefix_of_another_is_deferred_in_the_words_of_vllm(model):
    registry = CollectorRegistry()
    undo = _prometheus.install(registry, metrics_compat="vllm")
    batcher = batcher_of(model, max_num_batched_tokens=40, max_num_seqs=4)
    prompt = random_prompts(1, 60)[0]
    batcher.add_request(prompt, **GREEDY)
    batcher.step()
    batcher.add_request([*prompt[:-1], 3], **GREEDY)
    batcher.step()
    figures = scraped(registry, model)
    reasons = figures.by("vllm:num_requests_waiting_by_reason", "reason")
    assert reasons == {"capacity": 0, "deferred": 1}
    batcher.close()
    undo()


def test_the_catalog_says_each_metric_once_with_a_kind_that_its_name_tells():
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "info") == metric.name.endswith("_info")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert metric.help.endswith(".")
