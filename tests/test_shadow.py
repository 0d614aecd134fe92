"""What shadow decoding publishes is what an independent computation finds, and live traffic knows nothing of it."""

from __future__ import annotations

import copy
import gc
import weakref
from random import Random

import adapted
import pytest
import serve_models
import tiny_models
import torch
from family_models import build
from quality_model import small_llama
from served import assert_nothing_left, served, wait_until
from test_batcher_adapters import batcher_of as adapted_batcher_of
from test_batcher_tokens import prompts

from hfpaged import ContinuousBatcher, InvalidConfigError
from hfpaged.engine import events as ev
from hfpaged.engine import shadow as shadow_module
from hfpaged.engine import shadow_capture, spare_time
from hfpaged.engine.shadow_capture import MOST_ROWS, Capture, Room
from hfpaged.engine.shadow_support import attach_shadow
from hfpaged.quality.metrics import log_probs, score

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 257
NEW = 24
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
TWO = [list(range(3, 40)), list(range(50, 75))]


@pytest.fixture(scope="module")
def plain():
    """Nobody patches it: the judge."""
    return small_llama(max_position_embeddings=512)


@pytest.fixture
def model(plain):
    return copy.deepcopy(plain)


def batcher_of(model, shadow=1.0, kv_dtype="int8", **sizes):
    sizes = {"num_blocks": 100, "block_size": 8} | sizes
    return ContinuousBatcher(model, kv_dtype=kv_dtype, shadow=shadow, prepack=False, **sizes)


def finish(batcher):
    while batcher.loop.work_spare():
        pass


def shadow_of(batcher):
    return batcher.loop.spare


class Seen:
    """What the metrics say after all spare work is done, and that nothing is left of it."""

    def __init__(self, batcher, kv_format="int8"):
        finish(batcher)
        sums, _ = batcher.tally.read()
        count = {name: sums.numbers[f"hfpaged_shadow_{name}_total", kv_format] for name in ("requests", "tokens")}
        self.requests, self.tokens = count.values()
        self.agreed = sums.numbers["hfpaged_shadow_top1_agreed_tokens_total", kv_format]
        self.kl = sums.histograms["hfpaged_shadow_kl", kv_format]
        self.dropped = {
            key[2]: int(n) for key, n in sums.numbers.items() if key[0] == "hfpaged_shadow_dropped_total" and n
        }
        self.seconds = sums.numbers["hfpaged_shadow_seconds_total", kv_format]
        assert self.kl.count == self.tokens >= self.agreed
        shadow = shadow_of(batcher)
        assert shadow.num_pending == shadow.room.taken == 0
        assert_nothing_left(batcher)


def live_log_probs(output):
    """[new, vocab]: the distributions that the engine itself gave for `logprobs` of all tokens, in float32."""
    rows = torch.full((len(output.logprobs), VOCAB), -torch.inf, dtype=torch.float64)
    for row, position in zip(rows, output.logprobs, strict=True):
        for token in position.top:
            row[token.token_id] = token.logprob
    return rows


def judged(plain, output):
    """KL and agreement of one output by one forward of an unpatched model over all of it."""
    prompt, new = output.prompt_token_ids, output.token_ids
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[*prompt, *new[:-1]]])).logits[0, len(prompt) - 1 :]
    found = score(log_probs(logits), live_log_probs(output), torch.tensor(new))
    return found.kl, found.agrees


def expected(plain, outputs):
    parts = [judged(plain, output) for output in outputs]
    return torch.cat([kl for kl, _ in parts]), torch.cat([agrees for _, agrees in parts])


# What it finds


@pytest.mark.parametrize(
    ("kv_dtype", "settings", "sizes"),
    [
        ("int8", GREEDY, {}),
        ("int4", GREEDY, {}),
        ("int8", {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.5, "seed": 3}, {}),
        ("int8", {"max_new_tokens": NEW, "prompt_lookup_num_tokens": 3}, {}),
        ("int8", GREEDY, {"max_num_batched_tokens": 16, "max_num_seqs": 8}),  # prompts in chunks
        ("int8", {"max_new_tokens": 40, "do_sample": False}, {"num_blocks": 13, "watermark": 0.0}),  # with preemptions
    ],
    ids=["greedy", "int4", "sampled", "speculation", "chunks", "preempted"],
)
def test_metrics_are_what_an_independent_computation_finds(plain, model, kv_dtype, settings, sizes):
    batcher = batcher_of(model, kv_dtype=kv_dtype, **sizes)
    given = [[5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6], *TWO, [*TWO[0], 7, 8]]  # the last one shares a prefix
    outputs = batcher.generate(given, logprobs=VOCAB, **settings)
    assert sum(output.metrics.preemptions for output in outputs) > 0 or "watermark" not in sizes
    kl, agrees = expected(plain, outputs)
    seen = Seen(batcher, kv_dtype)
    assert kl.sum() > 1e-4
    assert (seen.requests, seen.tokens, seen.dropped) == (4, len(kl), {})
    assert seen.agreed == agrees.sum()
    assert seen.kl.sum == pytest.approx(float(kl.sum()), rel=1e-3, abs=1e-5 * len(kl))
    assert seen.seconds > 0


def test_a_native_pool_agrees_in_all(model):
    batcher = natively_shadowed(model, 64)
    outputs = batcher.generate([*TWO, [*TWO[0], 9]], **GREEDY)
    assert outputs[2].num_cached_tokens > 0
    seen = Seen(batcher, "auto")
    assert (seen.requests, seen.tokens, seen.agreed, seen.dropped) == (3, 3 * NEW, 3 * NEW, {})
    assert seen.kl.sum < 1e-9 * seen.tokens


FAMILIES = ("gemma2", "gpt_oss", "deepseek_v3", "mpt", "jamba", "bamba", "deepseek_v32", "zamba2", "glm_moe_dsa")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_second_computation_is_what_each_family_computes(name):
    batcher = natively_shadowed(build(name), 24)
    given = [[token % 90 + 3 for token in prompt] for prompt in prompts((5, 17, 23))]
    batcher.generate(given, max_new_tokens=12, do_sample=False)
    seen = Seen(batcher, "auto")
    assert (seen.requests, seen.tokens, seen.agreed, seen.dropped) == (3, 36, 36, {})
    assert seen.kl.sum < 1e-6 * seen.tokens


def test_prompts_that_must_come_at_once_do_and_have_their_bound():
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "factor": 8.0,
    }  # fmt: skip
    model = tiny_models.make(
        "phi3", rope_parameters=rope, original_max_position_embeddings=32, max_position_embeddings=256
    )
    batcher = natively_shadowed(model, 64)
    batcher.generate(prompts((20, 50, 90)), max_new_tokens=8, do_sample=False)
    seen = Seen(batcher, "auto")
    assert (seen.requests, seen.tokens, seen.agreed, seen.dropped) == (2, 16, 16, {"too_long": 1})
    assert seen.kl.sum < 1e-6 * seen.tokens


def natively_shadowed(model, budget):
    sizes = {"num_blocks": 400, "block_size": 4, "max_num_batched_tokens": budget, "max_num_seqs": 8}
    batcher = ContinuousBatcher(model, kv_dtype="auto", prepack=False, **sizes)
    (shadow,) = attach_shadow(with_share(batcher._parts, 1.0), batcher.loop, batcher.tally)
    batcher.hooks.append(shadow)
    return batcher


def with_share(parts, share):
    spec = copy.copy(parts.spec)
    object.__setattr__(spec, "shadow", share)
    parts = copy.copy(parts)
    object.__setattr__(parts, "spec", spec)
    return parts


def test_of_several_samples_the_first_is_compared(plain, model):
    batcher = batcher_of(model)
    (output,) = batcher.generate([TWO[0]], max_new_tokens=NEW, n=3, do_sample=True, seed=1, logprobs=VOCAB)
    assert len(output.sequences) == 3
    kl, agrees = judged(plain, output)
    seen = Seen(batcher)
    assert (seen.requests, seen.tokens, seen.agreed) == (1, NEW, agrees.sum())
    assert seen.kl.sum == pytest.approx(float(kl.sum()), rel=1e-3)


def test_a_sliding_model_is_compared_with_its_own_sliding_cache():
    model = tiny_models.make("mistral")
    batcher = ContinuousBatcher(model, num_blocks=200, block_size=4, kv_dtype="int8", shadow=1.0, prepack=False)
    batcher.generate(prompts((70, 20)), max_new_tokens=NEW, do_sample=False)
    seen = Seen(batcher)
    assert (seen.requests, seen.tokens, seen.dropped) == (2, 2 * NEW, {})
    assert seen.agreed > 0.8 * seen.tokens
    assert 0 < seen.kl.sum / seen.tokens < 0.05


def test_each_request_is_computed_again_under_its_own_adapter():
    model = copy.deepcopy(adapted.judge().model)
    batcher = adapted_batcher_of(model, kv_dtype="int8", shadow=1.0)
    names = [batcher.add_request(prompt, adapter=name, **GREEDY)
             for prompt, name in zip(prompts((20, 20, 9)), ("first", "second", adapted.BASE), strict=True)]  # fmt: skip
    while batcher.has_work:
        batcher.step()
    assert len(names) == 3
    seen = Seen(batcher)
    assert (seen.requests, seen.dropped) == (3, {})
    assert seen.agreed > 0.8 * seen.tokens  # under another adapter next to nothing agrees
    assert seen.kl.sum / seen.tokens < 0.02


def test_an_adapter_that_is_gone_is_a_reason():
    model = copy.deepcopy(adapted.judge().model)
    batcher = adapted_batcher_of(model, kv_dtype="int8", shadow=1.0)
    batcher.add_request(prompts((9,))[0], adapter="second", **GREEDY)
    while batcher.has_work:
        batcher.step()
    model.delete_adapter("second")
    assert Seen(batcher).dropped == {"adapter_lost": 1}


# What live traffic knows of it


@pytest.mark.parametrize("settings", [GREEDY, {"max_new_tokens": NEW, "do_sample": True, "seed": 7}])
def test_tokens_are_the_same_with_and_without_it(model, monkeypatch, settings):
    monkeypatch.setattr(spare_time.SpareTime, "is_earned", True)  # a piece behind each step, while others run
    found = []
    for share in (0.0, 1.0):
        batcher = batcher_of(model, shadow=share, max_num_seqs=2)
        outputs = batcher.generate([*TWO, [*TWO[0], 9], [7, 8, 9]], logprobs=3, **settings)
        found.append([(output.token_ids, output.logprobs) for output in outputs])
        if share:
            compared = batcher.tally.read()[0].numbers["hfpaged_shadow_requests_total", "int8"]
            assert compared > 0, "some were compared while others ran"
            Seen(batcher)
        batcher.close()
    assert found[0] == found[1]


def test_without_it_there_is_no_hook_and_no_metric(model):
    batcher = batcher_of(model, shadow=0.0)
    assert batcher.loop.spare is None
    assert not batcher.loop.work_spare()
    assert not any("shadow" in key[0] for key in batcher.tally.read()[0].numbers)


def test_a_draw_decides_for_each_request(model):
    batcher = batcher_of(model, shadow=0.25)
    shadow_of(batcher)._random = Random(0)
    batcher.generate([[3, number] for number in range(40)], max_new_tokens=1, do_sample=False)
    draws = Random(0)
    assert Seen(batcher).requests == sum(draws.random() < 0.25 for _ in range(40)) > 0


def test_work_beside_requests_takes_no_more_than_its_share_of_the_time():
    clock = spare_time.SpareTime()
    busy = spent = 0.0
    for number in range(20_000):
        seconds = 0.001 * (1 + number % 40)
        busy += seconds
        clock.earn(seconds)
        if clock.is_earned:
            took = 0.0005 * clock.tokens + 0.004 * (1 + number % 3)
            clock.spend(clock.tokens, took, beside=True)
            spent += took
    assert 0.5 * spare_time.BUSY_SHARE < spent / busy <= 1.01 * spare_time.BUSY_SHARE
    assert spare_time.FEWEST < clock.tokens < spare_time.MOST


def test_a_piece_is_as_long_as_the_speed_allows_within_bounds():
    clock = spare_time.SpareTime()
    assert clock.tokens == spare_time.FEWEST
    assert not clock.is_earned
    clock.spend(8, 8 * spare_time.PIECE_SECONDS / 100, beside=False)
    assert clock.tokens == 100
    clock.spend(8, 60.0, beside=False)
    assert clock.tokens == spare_time.FEWEST
    clock.spend(512, 0.0, beside=False)
    assert clock.tokens == spare_time.MOST


def test_a_piece_that_takes_longer_than_was_earned_is_paid_for():
    clock = spare_time.SpareTime()
    clock.earn(1.0)
    assert clock.is_earned
    clock.spend(8, 5.0, beside=True)
    clock.spend(512, 0.001, beside=False)  # idle time pays nothing, and costs nothing
    clock.earn(4.9 / spare_time.BUSY_SHARE)
    assert not clock.is_earned
    clock.earn(0.2 / spare_time.BUSY_SHARE)
    assert clock.is_earned


# What is left out


def test_aborted_and_failed_requests_and_beams_are_counted_and_leave_nothing(model):
    def fails(ids, scores):
        raise ValueError("no")

    batcher = batcher_of(model)
    given_up = batcher.add_request(TWO[0], **GREEDY)
    unseen = batcher.add_request(TWO[1], **GREEDY)
    batcher.abort(unseen)  # before any token
    batcher.add_request([3, 4, 5], logits_processor=[fails], **GREEDY)
    batcher.add_request([3, 4, 6], num_beams=2, **GREEDY)
    for _ in range(3):
        batcher.step()
    assert shadow_of(batcher).room.taken > 0
    batcher.abort(given_up)
    while batcher.has_work:
        batcher.step()
    seen = Seen(batcher)
    assert seen.dropped == {"aborted": 2, "failed": 1, "beams": 1}
    assert seen.requests == 0


def test_no_more_wait_than_may_and_logits_have_their_bound(model, monkeypatch):
    monkeypatch.setattr(shadow_module, "MOST_WAITING", 2)
    batcher = batcher_of(model)
    batcher.generate([[3, number] for number in range(5)], max_new_tokens=2, do_sample=False)
    assert shadow_of(batcher).num_pending == 2
    shadow_of(batcher).room.most = shadow_of(batcher).room.taken + VOCAB * 4 * 3
    batcher.generate([[4, 5]], max_new_tokens=9, do_sample=False)
    seen = Seen(batcher)
    assert (seen.requests, seen.dropped) == (2, {"backlog": 3, "memory": 1})


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (lambda m: m.setattr(shadow_module, "MOST_CACHE_BYTES", 1000), "too_long"),
        (lambda m: m.setattr(shadow_module, "free_memory", lambda device: 1000), "memory"),
        (lambda m: m.setattr(shadow_module.NativeRun, "advance", out_of_memory), "memory"),
        (lambda m: m.setattr(shadow_module.NativeRun, "advance", lambda *args: 1 / 0), "error"),
        (lambda m: m.setattr("hfpaged.engine.shadow_run.divergence", not_finite), "not_finite"),
        (lambda m: m.setattr(shadow_capture.Capture, "_see", lambda *args: 1 / 0), "error"),
    ],
    ids=["long", "memory", "torch's memory", "error", "not finite", "capture"],
)
def test_what_cannot_be_computed_again_is_left_out_with_its_reason(model, monkeypatch, caplog, patch, reason):
    patch(monkeypatch)
    batcher = batcher_of(model)
    outputs = batcher.generate(TWO, **GREEDY)
    assert all(len(output.token_ids) == NEW for output in outputs)
    assert Seen(batcher).dropped == {reason: 2}
    monkeypatch.undo()
    batcher.generate([[3, 4, 5]], **GREEDY)
    assert Seen(batcher).requests == 1
    assert "3, 4, 5" not in caplog.text


def out_of_memory(*args):
    raise torch.OutOfMemoryError


def not_finite(native, live):
    return torch.full((len(live),), torch.inf), torch.ones(len(live), dtype=torch.bool)


@pytest.mark.parametrize("end", ["close", "running"])
def test_what_waits_at_the_end_is_dropped_and_counted(model, monkeypatch, end):
    monkeypatch.setattr(shadow_module.Shadow, "work", lambda self: False)  # there was no time
    batcher = batcher_of(model)
    batcher.generate(TWO, **GREEDY)
    batcher.add_request([3, 4, 5], **GREEDY)
    batcher.step()
    assert shadow_of(batcher).num_pending == 3
    if end == "close":
        batcher.close()
    else:
        with batcher.running():
            pass
    assert Seen(batcher).dropped == {"stopped": 2, "aborted": 1}


def test_a_batcher_that_is_dropped_goes_with_all_that_was_kept(model):
    batcher = batcher_of(model)
    batcher.generate(TWO, **GREEDY)
    gone = [weakref.ref(batcher), weakref.ref(shadow_of(batcher))]
    del batcher
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_interrupted_steps_show_a_position_twice_and_it_counts_once(model):
    seq, room = object(), Room(10_000)
    capture = Capture(seq, room, Random(0))
    for position in (4, 5, 5, 6):
        capture.see(position, torch.zeros(VOCAB))
    assert list(capture.rows) == [4, 5, 6]
    assert room.taken == 3 * VOCAB * 4
    capture.lose("memory")
    capture.see(7, torch.zeros(VOCAB))
    assert (capture.rows, room.taken) == ({}, 0)


def test_ctrl_c_in_the_middle_of_a_piece_changes_no_figure(plain, model):
    batcher = batcher_of(model)
    outputs = batcher.generate(TWO, logprobs=VOCAB, **GREEDY)
    layers = list(model.model.layers)
    calls = []

    def interrupt(module, args):
        calls.append(module)
        if len(calls) == 3:  # the first layer has the piece, this one not
            raise KeyboardInterrupt

    handle = layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        finish(batcher)
    handle.remove()
    kl, agrees = expected(plain, outputs)
    seen = Seen(batcher)
    assert (seen.requests, seen.agreed) == (2, agrees.sum())
    assert seen.kl.sum == pytest.approx(float(kl.sum()), rel=1e-3)


def test_of_a_long_answer_each_position_is_as_likely_to_be_kept():
    kept = torch.zeros(200)
    room = Room(10**9)
    for seed in range(300):
        capture = Capture(None, room, Random(seed))
        for position in range(200):
            capture.see(position, torch.zeros(1))
        assert len(capture.rows) == MOST_ROWS
        kept[list(capture.rows)] += 1
        capture.clear()
    assert room.taken == 0
    share = MOST_ROWS / 200
    fifths = kept.view(5, 40).mean(dim=1) / 300
    # Five standard errors of a mean over 40 x 300 draws.
    assert (fifths - share).abs().max() < 5 * (share * (1 - share) / 12_000) ** 0.5


def test_a_long_answer_is_compared_at_the_kept_positions(plain, model):
    batcher = batcher_of(model)
    told = []
    batcher.hooks.append(told.append)
    (output,) = batcher.generate([TWO[0]], max_new_tokens=100, do_sample=False, logprobs=VOCAB, ignore_eos=True)
    positions = sorted(shadow_of(batcher)._waiting[0].capture.rows)
    kl, agrees = judged(plain, output)
    chosen = [position - len(TWO[0]) for position in positions]
    seen = Seen(batcher)
    assert (seen.tokens, seen.agreed) == (MOST_ROWS, agrees[chosen].sum())
    (event,) = [event for event in told if isinstance(event, ev.ShadowCompared)]
    assert event.kl == pytest.approx(kl[chosen].tolist(), rel=1e-2, abs=1e-6)


# Where there is nothing to compare


def test_a_native_pool_is_refused_with_the_remedy(model):
    for kv_dtype in ("auto", "float32", {"default": "float32", "layers": {0: "auto"}}):
        with pytest.raises(InvalidConfigError, match=r"there is nothing to compare; give it a kv_dtype such as int8"):
            batcher_of(model, kv_dtype=kv_dtype)
    assert batcher_of(model, kv_dtype="bfloat16").loop.spare is not None  # less than the model computes


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_between_none_and_all(model, share):
    with pytest.raises(InvalidConfigError, match=r"is a share of the requests; use 0 to 1"):
        batcher_of(model, shadow=share)


# A server


def test_a_server_publishes_it_and_no_token(plain):
    model = copy.deepcopy(plain)
    model.config._name_or_path = "a-shadowed-model"
    batcher = batcher_of(model)
    with served(batcher) as server:
        for prompt in TWO:
            body = {"model": "a-shadowed-model", "prompt": prompt, "max_tokens": NEW, "temperature": 0}
            assert server.client.post("/v1/completions", json=body).status_code == 200
        wait_until(lambda: f'shadow_requests_total{{kv_format="int8",{NAME}}} 2.0' in metrics(server))
        text = metrics(server)
    lines = [line for line in text.splitlines() if line.startswith("hfpaged_shadow")]
    assert f'hfpaged_shadow_tokens_total{{kv_format="int8",{NAME}}} {2 * NEW}.0' in lines
    assert f'hfpaged_shadow_kl_count{{kv_format="int8",{NAME}}} {2 * NEW}.0' in lines
    assert f'hfpaged_shadow_dropped_total{{kv_format="int8",{NAME},reason="aborted"}} 0.0' in lines
    names = {line.partition("{")[0] for line in lines}
    assert len(names) == 8, names  # six metrics, one of which has three names
    Seen(batcher)
    batcher.close()


NAME = 'model_name="a-shadowed-model"'


def metrics(server):
    return server.client.get("/metrics").text


def test_a_client_that_leaves_in_the_middle_leaves_nothing():
    batcher = serve_models.batcher(kv_dtype="int8", shadow=1.0, prepack=False)

    def wait_for_the_abort(event):
        """After ten steps the engine waits until it has been told that the client has gone."""
        if isinstance(event, ev.StepFinished) and event.number == begin + 10:
            wait_until(lambda: batcher.loop._inbox)

    with served(batcher) as server:
        begin = batcher.loop.engine.num_steps
        batcher.hooks.append(wait_for_the_abort)
        body = {"prompt": [5, 6, 7, 8], "max_tokens": 60, "stream": True, "ignore_eos": True}
        body |= {"model": server.service.model_names[0]}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            next(answer.iter_lines())
    seen = Seen(batcher)
    assert (seen.dropped, seen.requests) == ({"aborted": 1}, 0)
    batcher.close()
