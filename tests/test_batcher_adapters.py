"""Requests that choose among a model's PEFT adapters get what generate() gives under each, in any company."""

from __future__ import annotations

import copy

import adapted
import pytest
import tiny_models
import torch
from adapted import BASE, LORA, Judge, lora, under, with_large_adapters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import (
    IA3Config,
    PromptTuningConfig,
    TaskType,
    VeraConfig,
)
from test_batcher_graphs import capture_of, with_graphs
from test_batcher_tokens import SIZES, checked, prompts

import hfpaged
from hfpaged import AdapterLostError, ContinuousBatcher, InvalidConfigError, PagedCache, compat
from hfpaged.engine import events as ev
from hfpaged.prepack import prepack_report
from hfpaged.prepack_gain import LinearGain

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 8
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
NAMES = (*LORA, BASE)
CHOICES = (*NAMES, None)


@pytest.fixture
def model():
    return copy.deepcopy(adapted.judge().model)


def batcher_of(model, **sizes):
    return ContinuousBatcher(model, prepack=False, **{"num_blocks": 300, "block_size": 4} | sizes)


def run(batcher, requests, **arguments):
    """The outputs of (prompt, adapter) pairs that come at once, in their order."""
    outputs = {}
    names = [batcher.add_request(p, adapter=adapter, **{**GREEDY, **arguments}) for p, adapter in requests]
    while batcher.has_work:
        outputs |= {output.request_id: output for output in batcher.step()}
    return [outputs[name] for name in names]


def tokens(batcher, requests, **arguments):
    return [output.token_ids for output in run(batcher, requests, **arguments)]


def expected(requests, judge=None, **arguments):
    return [(judge or adapted.judge()).tokens(p, adapter, **{**GREEDY, **arguments})[0] for p, adapter in requests]


def pairs(count=8, names=CHOICES):
    """Prompts with the adapters by turns."""
    lengths = [(4, 21, 1, 17, 9, 13)[i % 6] for i in range(count)]
    return list(zip(prompts(lengths), (names * count)[:count], strict=True))


# Tokens


def test_the_adapters_of_these_tests_are_not_alike():
    (prompt,) = prompts([13])
    assert len({str(tokens) for tokens in expected([(prompt, name) for name in NAMES])}) == len(NAMES)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_requests_for_different_adapters_get_the_tokens_of_each(model, sizes):
    events = []
    batcher = batcher_of(model, hooks=(events.append,), **sizes)
    requests = pairs(12)
    wanted = expected(requests)
    assert tokens(batcher, requests) == wanted
    assert tokens(batcher, requests) == wanted  # with known prefixes
    assert batcher.describe()["adapters"] == "first, second, third (side by side)"
    if sizes.get("num_blocks") == 24:
        assert any(type(event) is ev.Preempted for event in events)
    checked(batcher)


KINDS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "looked up": {"prompt_lookup_num_tokens": 4},
    "samples": {"do_sample": True, "n": 2, "seed": 7},
}


@st.composite
def mixtures(draw):
    requests = draw(
        st.lists(
            st.tuples(
                st.integers(0, 5), st.sampled_from(CHOICES), st.sampled_from(("greedy", *KINDS)),
                st.integers(0, 3), st.sampled_from((None, None, None, 0, 2, 5)),
            ),
            min_size=2, max_size=9,
        )
    )  # fmt: skip
    sizes = draw(st.sampled_from(tuple(SIZES.values())))
    return requests, sizes | {"max_num_seqs": max(sizes.get("max_num_seqs", 8), 3)}


@pytest.fixture(scope="module")
def of_all():
    """A model for all examples, and what single requests got: those that sample can be compared with themselves."""
    return copy.deepcopy(adapted.judge().model), {}


@given(mixture=mixtures())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_mixture_of_adapters_arrivals_and_aborts(of_all, mixture):
    model, _ = of_all
    requests, sizes = mixture
    batcher = batcher_of(model, **sizes)
    rows = prompts([9] * 3 + [23] * 3, seed=3)
    rows = [rows[0], rows[0][:6] + rows[1], rows[2], rows[3], rows[3][:20] + rows[4], rows[5]]  # common beginnings
    outputs, asked, aborts = {}, {}, {}  # aborts: steps that are left until then

    def step():
        outputs.update({output.request_id: output for output in batcher.step()})
        for name in [name for name, left in aborts.items() if left <= 0]:
            batcher.abort(name)
            del aborts[name]
        aborts.update({name: left - 1 for name, left in aborts.items()})

    for row, adapter, kind, wait, abort in requests:
        name = batcher.add_request(rows[row], adapter=adapter, **GREEDY | KINDS[kind])
        asked[name] = rows[row], adapter, kind
        aborts |= {} if abort is None else {name: abort}
        for _ in range(wait):
            step()
    while batcher.has_work:
        step()
    for name, (row, adapter, kind) in asked.items():
        found = [sequence.token_ids for sequence in outputs[name].sequences]
        if outputs[name].finish_reason == "abort":
            continue
        assert outputs[name].error is None
        assert found == wanted_of(of_all, row, adapter, kind), (adapter, kind)
    assert model.active_adapter == "first"
    checked(batcher)


def wanted_of(of_all, row, adapter, kind):
    if kind != "samples":
        settings = {key: given for key, given in KINDS[kind].items() if key == "num_beams"}
        return adapted.judge().tokens(row, adapter, **GREEDY | settings)
    model, known = of_all
    key = (tuple(row), adapter)
    if key not in known:
        with under(model, adapter), batcher_of(model) as alone:
            (output,) = alone.generate([row], **GREEDY | KINDS[kind])
        known[key] = [sequence.token_ids for sequence in output.sequences]
    return known[key]


def test_streams_and_generate_take_an_adapter(model):
    batcher = batcher_of(model)
    (prompt,) = prompts([9])
    wanted = expected([(prompt, "second")])[0]
    assert batcher.generate([prompt], adapter="second", **GREEDY)[0].token_ids == wanted
    assert [t for piece in batcher.stream(prompt, adapter="second", **GREEDY) for t in piece.token_ids] == wanted
    checked(batcher)


# What a request means


def test_without_an_adapter_a_request_gets_those_that_are_active_on_the_model(model):
    batcher = batcher_of(model)
    (prompt,) = prompts([9])
    for name in NAMES:
        with under(model, name):
            assert tokens(batcher, [(prompt, None), (prompt, "third"), (prompt, BASE)]) == expected(
                [(prompt, name), (prompt, "third"), (prompt, BASE)]
            )
    model.base_model.set_adapter(["first", "second"])
    twin = Judge(copy.deepcopy(model))
    hfpaged.unpatch(twin.model)
    asked = [(prompt, None), (prompt, "third"), (prompt, None)]
    wanted = [twin.tokens(prompt, None, **GREEDY)[0], expected(asked)[1], twin.tokens(prompt, None, **GREEDY)[0]]
    assert wanted[0] not in expected([(prompt, name) for name in NAMES])
    assert tokens(batcher, asked) == wanted
    checked(batcher)


def test_an_adapter_that_is_not_there_is_refused_with_those_that_are(model):
    batcher = batcher_of(model)
    with pytest.raises(InvalidConfigError, match="'nobody' is unknown; the model has 'first', 'second', 'third', and"):
        batcher.add_request([5, 6], adapter="nobody")
    assert not batcher.has_work
    checked(batcher)
    plain = ContinuousBatcher(tiny_models.shared("llama"), num_blocks=20, prepack=False)
    with pytest.raises(InvalidConfigError, match="the model has none: load one with PEFT"):
        plain.add_request([5, 6], adapter="first")
    assert plain.describe()["adapters"] == "none"
    (prompt,) = prompts([9])
    assert tokens(plain, [(prompt, BASE), (prompt, None)]) == expected([(prompt, BASE)] * 2)
    checked(plain)


def test_what_lies_merged_in_the_weights_cannot_be_chosen(model):
    batcher = batcher_of(model)
    (prompt,) = prompts([9])
    name = batcher.add_request(prompt, adapter="second", **GREEDY)
    with_none = batcher.add_request(prompt, **GREEDY)
    batcher.step()
    model.merge_adapter(["first"])
    with pytest.raises(InvalidConfigError, match=r"'first' lies merged in the weights .* unmerge_adapter"):
        batcher.add_request(prompt, adapter="second")
    outputs = {}
    while batcher.has_work:
        outputs |= {output.request_id: output for output in batcher.step()}
    assert isinstance(outputs[name].error, AdapterLostError)
    assert outputs[with_none].token_ids == expected([(prompt, "first")])[0]
    model.unmerge_adapter()
    assert tokens(batcher, [(prompt, "second")]) == expected([(prompt, "second")])
    checked(batcher)


def test_adapters_that_learn_a_prompt_are_refused_by_name():
    made = adapted.make({"first": LORA["first"]})
    made.peft_config["prompted"] = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    batcher = batcher_of(made)
    with pytest.raises(
        InvalidConfigError, match=r"'prompted' cannot be chosen .*: PROMPT_TUNING puts tokens of its own"
    ):
        batcher.add_request([5, 6], adapter="prompted")
    checked(batcher)


def test_adapters_that_act_from_certain_tokens_on_are_refused_by_name():
    made = adapted.make({"first": LORA["first"], "invoked": LORA["first"] | {"alora_invocation_tokens": [5, 6]}})
    batcher = batcher_of(made)
    assert "not invoked: it acts from certain tokens" in batcher.describe()["adapters"]
    with pytest.raises(InvalidConfigError, match=r"'invoked' cannot be chosen for single requests: .*aLoRA"):
        batcher.add_request([5, 6], adapter="invoked")
    checked(batcher)


# What is the model's owner's stays so


def states(model):
    return [(m._active_adapter, m._disable_adapters) for m in model.modules() if hasattr(m, "lora_A")]


def test_the_model_is_left_as_it_was_found(model):
    batcher = batcher_of(model)
    for setting in (lambda: model.set_adapter("second"), model.base_model.disable_adapter_layers):
        setting()
        model.requires_grad_(False)
        before, forwards = states(model), [m for m in model.modules() if "forward" in vars(m)]
        batcher.add_request([5, 6, 7], adapter="first", **GREEDY)
        batcher.step()
        assert states(model) == before
        run(batcher, pairs(4))
        assert states(model) == before
        assert [m for m in model.modules() if "forward" in vars(m)] == forwards
        assert not any(parameter.requires_grad for parameter in model.parameters())
    checked(batcher)


def test_a_forward_that_fails_leaves_it_so_too(model):
    batcher = batcher_of(model)
    requests = pairs(4, NAMES)
    before = states(model)
    own, calls = model.get_base_model().model.layers[1].mlp.forward, []

    def fails(x):
        calls.append(states(model))
        raise RuntimeError("broken")

    model.get_base_model().model.layers[1].mlp.forward = fails
    assert {str(output.error) for output in run(batcher, requests)} == {"broken"}
    assert [str(output.error) for output in run(batcher, requests[1:2])] == ["broken"]
    assert calls[-1] != before  # while it was computed another one was active
    assert states(model) == before
    model.get_base_model().model.layers[1].mlp.forward = own
    assert tokens(batcher, requests) == expected(requests)
    checked(batcher)


def test_steps_in_which_nobody_chose_touch_no_layer_of_the_adapters(model, monkeypatch):
    batcher = batcher_of(model)
    router = batcher._parts.router
    for name in ("_look_again", "_apart", "chosen"):
        monkeypatch.setattr(router, name, None)
    monkeypatch.setattr(router._mixed, "over", None)
    batcher._parts.engine.shares_prefixes = False
    assert tokens(batcher, pairs(4, (None,))) == expected(pairs(4, (None,)))
    checked(batcher)


def test_an_adapter_alone_in_its_step_takes_no_routes(model, monkeypatch):
    batcher = batcher_of(model)
    monkeypatch.setattr(batcher._parts.router._mixed, "over", None)
    assert tokens(batcher, pairs(4, ("second",))) == expected(pairs(4, ("second",)))
    checked(batcher)


# Adapters that come and go


def test_an_adapter_that_is_loaded_while_requests_run_can_be_chosen(model):
    batcher = batcher_of(model)
    (prompt,) = prompts([13])
    running = [batcher.add_request(prompt, adapter=name, **GREEDY) for name in (BASE, "second")]
    batcher.step()
    model.add_adapter("fourth", lora(target_modules=["gate_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if "fourth" in name:
            parameter.data.normal_(std=0.4, generator=generator)
    model.requires_grad_(False).eval()
    twin = copy.deepcopy(model)
    hfpaged.unpatch(twin)
    outputs = {}
    running += [batcher.add_request(prompt, adapter=name, **GREEDY) for name in ("fourth", "first")]
    while batcher.has_work:
        outputs |= {output.request_id: output for output in batcher.step()}
    wanted = expected([(prompt, name) for name in (BASE, "second", "fourth", "first")], Judge(twin))
    assert [outputs[name].token_ids for name in running] == wanted
    assert len({str(found) for found in wanted}) == 4
    assert batcher.describe()["adapters"] == "first, second, third, fourth (side by side)"
    checked(batcher)


@pytest.mark.parametrize("shares", [True, False])
def test_requests_of_an_adapter_that_is_deleted_fail_and_nobody_else(model, shares):
    batcher = batcher_of(model, prefix_sharing=shares)
    (prompt,) = prompts([13])
    asked = [(prompt, name) for name in ("first", "second", BASE, "second")]
    names = [batcher.add_request(p, adapter=adapter, **GREEDY) for p, adapter in asked[:3]]
    batcher.step()
    names.append(batcher.add_request(prompt, adapter="second", **GREEDY))
    model.delete_adapter("second")
    with pytest.raises(InvalidConfigError, match="the model has 'first', 'third'"):
        batcher.add_request(prompt, adapter="second")
    outputs = {}
    while batcher.has_work:
        outputs |= {output.request_id: output for output in batcher.step()}
    for name, (_, adapter), wanted in zip(names, asked, expected(asked), strict=True):
        if adapter == "second":
            assert isinstance(outputs[name].error, AdapterLostError)
            assert "no adapter 'second' any more" in str(outputs[name].error)
        else:
            assert outputs[name].token_ids == wanted
    checked(batcher)


# Prefixes


def hits(batcher, prompt, adapter):
    (output,) = run(batcher, [(prompt, adapter)])
    assert output.token_ids == expected([(prompt, adapter)])[0]
    return output.num_cached_tokens


def test_prefixes_are_shared_under_one_adapter_and_never_between_two(model):
    batcher = batcher_of(model)
    (prompt,) = prompts([41])
    assert [hits(batcher, prompt, name) for name in ("first", "second", BASE)] == [0, 0, 0]
    assert [hits(batcher, prompt, name) for name in ("first", "second", BASE)] == [40, 40, 40]
    assert hits(batcher, prompt, "third") == 0
    assert hits(batcher, prompt, None) == 40  # the first one is active
    model.set_adapter("second")
    batcher.add_request(prompt, salt="s", adapter="first", **GREEDY)
    batcher.add_request(prompt, adapter="first", **GREEDY)
    assert [output.num_cached_tokens for output in batcher.step()] == [0, 40]
    while batcher.has_work:
        batcher.step()
    checked(batcher)


def test_a_cache_on_the_model_under_an_adapter_finds_what_requests_computed_and_the_other_way_round(model):
    batcher = batcher_of(model)
    first, second = prompts([41, 37])

    def generate(prompt, adapter):
        cache = PagedCache(model, pool=batcher.pool)
        with under(model, adapter):
            ids = torch.tensor([prompt])
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY, **{compat.cache_argument(): cache}
            )
        assert out[0, len(prompt) :].tolist() == expected([(prompt, adapter)])[0]
        (report,) = cache.explain_last()
        return report.hit_tokens

    for adapter in NAMES:
        assert hits(batcher, first, adapter) == 0
        assert generate(first, adapter) == 40
        assert generate(second, adapter) == 0
        assert hits(batcher, second, adapter) == 36
    checked(batcher)


def test_explanations_know_the_adapter(model):
    batcher = batcher_of(model)
    (prompt,) = prompts([41])
    run(batcher, [(prompt, "second")])
    assert batcher.pool.explain(prompt, adapter="second").known_tokens == 40
    for other in ("first", None):
        report = batcher.pool.explain(prompt, adapter=other)
        assert (report.known_tokens, report.reason) == (0, "other key")
        assert "adapter" in report.differing_keys
    checked(batcher)


# Kinds of adapters


def dora(**settings):
    return lora(target_modules=["q_proj", "down_proj"], use_dora=True, **settings)


SIDE_BY_SIDE = {
    "dora": {"first": dora(), "second": LORA["second"]},
    "head and embedding": {
        "first": lora(target_modules=["embed_tokens", "lm_head", "q_proj"]), "second": lora(target_modules=["lm_head"]),
        "third": dora(),
    },
    "a copy of the head": {
        "first": lora(target_modules=["q_proj"], modules_to_save=["lm_head"]), "second": LORA["second"],
        "third": lora(target_modules=["v_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    },
    "biases": {"first": lora(target_modules=["q_proj", "v_proj"], lora_bias=True)},
    "ranks and scales": {
        "first": lora(target_modules="all-linear", rank_pattern={"q_proj": 8}, alpha_pattern={"k_proj": 9}),
        "second": LORA["third"],
    },
    "ia3": {
        "first": IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type=TaskType.CAUSAL_LM
        ),
        "second": IA3Config(target_modules=["v_proj"], feedforward_modules=[], task_type=TaskType.CAUSAL_LM),
    },
    "vera": {"first": VeraConfig(target_modules=["q_proj", "o_proj"], r=8, task_type=TaskType.CAUSAL_LM)},
}  # fmt: skip
APART = {"trainable tokens": {"first": lora(target_modules=["q_proj"], trainable_token_indices=[5, 6, 7]),
                              "second": LORA["second"]}}  # fmt: skip


@pytest.mark.parametrize("kind", [*SIDE_BY_SIDE, *APART])
def test_kinds_of_adapters(kind):
    configs = (SIDE_BY_SIDE | APART)[kind]
    model = adapted.make(copy.deepcopy(configs))
    judge = Judge(copy.deepcopy(model))
    batcher = batcher_of(model, max_num_batched_tokens=24, max_num_seqs=8)
    told = batcher.describe()["adapters"]
    assert ("(side by side)" in told) == (kind in SIDE_BY_SIDE), told
    requests = pairs(8, (*configs, BASE, None))
    wanted = expected(requests, judge)
    (prompt,) = prompts([13])
    assert len({str(found) for found in expected([(prompt, n) for n in (*configs, BASE)], judge)}) == len(configs) + 1
    assert tokens(batcher, requests) == wanted
    assert tokens(batcher, requests, prompt_lookup_num_tokens=3) == wanted
    checked(batcher)


@pytest.mark.parametrize("name", ["gemma2", "bloom", "gpt_oss", "gpt2", "deepseek_v3"])
def test_other_architectures(name):
    targets = {"bloom": ["query_key_value", "dense_4h_to_h"], "gpt2": ["c_attn", "c_proj"],
               "deepseek_v3": ["kv_b_proj", "o_proj", "down_proj"]}  # fmt: skip
    targets = targets.get(name, ["q_proj", "o_proj"])
    model = adapted.make({"first": {"target_modules": targets}, "second": {"target_modules": targets[:1]}}, name)
    judge = Judge(copy.deepcopy(model))
    batcher = batcher_of(model, num_blocks=900)
    requests = pairs(6, ("first", "second", BASE))
    assert tokens(batcher, requests) == expected(requests, judge)
    checked(batcher)


def test_adapters_on_experts_get_a_forward_each():
    """Experts are given some of the tokens, in no row."""
    configs = {"first": lora(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"], lora_alpha=8),
               "second": {"target_modules": ["q_proj"]}}  # fmt: skip
    model = adapted.make(configs, "gpt_oss")
    judge = Judge(copy.deepcopy(model))
    batcher = batcher_of(model, num_blocks=600)
    assert "one forward for each" in batcher.describe()["adapters"]
    requests = pairs(6, ("first", "second", BASE))
    assert tokens(batcher, requests) == expected(requests, judge)
    checked(batcher)


def test_a_base_layer_with_a_hook_gives_each_adapter_a_forward(model):
    """A hook that adds something would add it again for each adapter."""
    judge = Judge(copy.deepcopy(model))
    for each in (model, judge.model):
        layer = each.get_base_model().model.layers[0].self_attn.q_proj.base_layer
        layer.register_forward_hook(lambda module, _, out: out + 0.5)
    batcher = batcher_of(model)
    assert "has a base layer with hooks" in batcher.describe()["adapters"]
    requests = pairs(6, NAMES)
    assert tokens(batcher, requests) == expected(requests, judge)
    checked(batcher)


def test_a_layer_that_turns_out_to_be_given_other_tokens_ends_the_mixing(model, monkeypatch):
    batcher = batcher_of(model)
    assert "(side by side)" in batcher.describe()["adapters"]
    attention = model.get_base_model().model.layers[0].self_attn
    own = attention.q_proj

    class Halves(torch.nn.Module):
        def forward(self, x):
            return torch.cat([own(part) for part in x.split((x.shape[1] + 1) // 2, dim=1)], dim=1)

    attention.q_proj = Halves()
    requests = pairs(6, NAMES)
    assert tokens(batcher, requests) == expected(requests)
    assert "one forward for each: a Linear is given" in batcher.describe()["adapters"]
    attention.q_proj = own
    checked(batcher)


def test_when_blocks_run_out_between_two_forwards_nothing_of_the_first_is_left(model):
    """Adapters one after the other in a pool that has no room for all of them."""
    batcher = batcher_of(model, num_blocks=24, max_num_batched_tokens=32, max_num_seqs=16)
    batcher._parts.router.why_apart = "a test"
    requests = pairs(12, NAMES)
    assert tokens(batcher, requests) == expected(requests)
    checked(batcher)


def test_adapters_that_transformers_has_loaded(monkeypatch):
    """transformers 5.24 asks for a PEFT that is newer than any release; what it uses here is in older ones."""
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda min_version: None)
    plain = tiny_models.make("llama")
    for name, given_settings in LORA.items():
        plain.add_adapter(lora(**given_settings), adapter_name=name)
    with_large_adapters(plain)
    batcher = batcher_of(plain)
    requests = pairs(6, NAMES)
    assert tokens(batcher, requests) == expected(requests)
    checked(batcher)


def test_no_graph_computes_a_step_of_a_chosen_adapter(model):
    batcher = with_graphs(ContinuousBatcher(model, num_blocks=200, prepack=False))
    requests = pairs(6, NAMES)
    assert tokens(batcher, requests) == expected(requests)
    assert tokens(batcher, requests[:1]) == expected(requests[:1])
    assert capture_of(batcher).repeats == 0
    assert tokens(batcher, pairs(2, (None,))) == expected(pairs(2, (None,)))
    assert capture_of(batcher).repeats > 0
    checked(batcher)


def test_on_weights_that_are_packed_for_the_cpu(model, monkeypatch):
    monkeypatch.setattr(LinearGain, "is_gain", True)
    batcher = ContinuousBatcher(model, num_blocks=300, block_size=4, prepack=True)
    assert prepack_report(model.get_base_model()).layers > 10
    requests = pairs(8)
    assert tokens(batcher, requests) == expected(requests)
    checked(batcher)
