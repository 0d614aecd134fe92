"""Weights in oneDNN's order: the same tokens, and plain weights for everybody who asks for them."""

from __future__ import annotations

import copy
import importlib
import io
import weakref

import psutil
import pytest
import tiny_models
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

import hfpaged
from hfpaged import compat, demo_model, onednn_weight
from hfpaged.fingerprint import model_keys
from hfpaged.onednn_weight import OnednnWeight
from hfpaged.patching import is_patched
from hfpaged.prepack import is_prepacked, prepack, prepack_report, unprepack
from hfpaged.prepack_gain import LinearGain, RowTime, measure

prepack_file = importlib.import_module("hfpaged.prepack")
CACHE = compat.cache_argument()
INPUTS = tiny_models.prompts([9, 4, 22])
X = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(3))

needs_onednn = pytest.mark.skipif(onednn_weight.onednn_fault() is not None, reason=str(onednn_weight.onednn_fault()))


def times(*gains, rows=(1, 8, 32, 256)):
    return tuple(RowTime(count, gain, 1.0) for count, gain in zip(rows, gains, strict=True))


@pytest.fixture
def always(monkeypatch):
    """Every layer is measured to be twice as fast, on whatever machine this runs; but for dtypes that its CPU lacks."""

    def measured(weights, rows, is_tied):
        onednn_weight.reordered(weights[0].detach())  # raises, as measuring it does
        return LinearGain(tuple(weights[0].shape), weights[0].dtype, times(2, 2, 2, 2), is_tied=is_tied)

    monkeypatch.setattr(prepack_file, "measure", measured)


def layers(model):
    return [module for module in model.modules() if type(module) is nn.Linear]


@pytest.fixture
def model(always):
    """A packed llama with an untied head, whose 15 linear layers all are nn.Linear."""
    made = tiny_models.make("llama")
    assert prepack(made).layers == 15
    return made


@pytest.fixture
def plain():
    return tiny_models.make("llama")


@pytest.fixture
def tied(always):
    made = tiny_models.make("llama", tie_word_embeddings=True)
    prepack(made, copied_share=1.0)
    return made


def generate(model, **arguments):
    return model.generate(**INPUTS, max_new_tokens=8, do_sample=False, **arguments).tolist()


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def assert_same_weights(model, other):
    for name, weight in other.named_parameters():
        found = model.get_parameter(name)
        assert type(found) is nn.Parameter, name
        assert torch.equal(bits(found), bits(weight)), name


# What it computes


@needs_onednn
@pytest.mark.parametrize("cache", [DynamicCache, hfpaged.PagedCache])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt_neox", "opt", "gemma2", "falcon"])
def test_a_packed_model_generates_the_same_tokens_and_stays_packed(always, name, cache):
    model = tiny_models.make(name)
    expected = generate(model)
    packed = prepack(model).layers
    assert packed
    assert generate(model, **{CACHE: cache(config=model.config)}) == expected
    assert prepack_report(model).layers == packed
    hfpaged.unpatch(model)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_plain_weights_come_back_bit_for_bit(always, dtype):
    model = tiny_models.make("llama").to(dtype)
    with torch.no_grad():
        layers(model)[0].weight[0, :4] = torch.tensor([-0.0, torch.inf, torch.nan, 1e-8])
    original = copy.deepcopy(model)
    report = prepack(model)
    if not report.layers:
        pytest.skip(str(report))
    assert is_prepacked(model)
    unprepack(model)
    assert not is_prepacked(model)
    assert_same_weights(model, original)


@needs_onednn
@pytest.mark.parametrize(
    "x",
    [X, X[0, 0], X[:0], X.transpose(0, 1), X[:, ::2], X.expand(2, 3, 5, 48)],
    ids=["3d", "1d", "no_rows", "transposed", "strided", "4d"],
)
def test_inputs_of_any_shape_give_what_linear_gives(model, plain, x):
    with torch.no_grad():
        ours, theirs = model.model.layers[0].mlp.up_proj(x), plain.model.layers[0].mlp.up_proj(x)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert prepack_report(model).layers == 15


@needs_onednn
def test_inputs_that_linear_refuses_are_refused_with_its_words(model, plain):
    for x in (torch.randn(2, 47), torch.randn(2, 48, dtype=torch.float64)):
        with pytest.raises(RuntimeError) as theirs:
            plain.lm_head(x)
        with pytest.raises(RuntimeError) as ours:
            model.lm_head(x)
        assert str(ours.value) == str(theirs.value)


@needs_onednn
def test_a_bias_is_added(always):
    model, plain = tiny_models.make("qwen2"), tiny_models.make("qwen2")
    with torch.no_grad():
        for each in (model, plain):
            each.model.layers[0].self_attn.q_proj.bias.fill_(3.0)
        prepack(model)
        ours, theirs = (each.model.layers[0].self_attn.q_proj(X) for each in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert theirs.mean() > 1


@needs_onednn
@pytest.mark.demo_model
def test_eight_prompts_of_the_demo_model_give_the_same_tokens(always):
    model, tokenizer = demo_model.load()
    texts = ["The capital of France is", "Once upon a time", "def fib(n):", "Water boils at", "In 1969", "The sun"]
    inputs = tokenizer([*texts, "My favourite food is", "A cat, a dog and"], return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    with torch.no_grad():
        logits = model(**inputs).logits
        assert prepack(model).layers == 211
        difference = (model(**inputs).logits - logits)[inputs["attention_mask"].bool()].abs().max()
    assert 0 < difference < 1e-3  # of logits up to 35: rounding, and not the same kernel
    assert model.generate(**inputs, **settings).tolist() == expected.tolist()
    cache = hfpaged.PagedCache(model)
    assert model.generate(**inputs, **settings, **{CACHE: cache}).tolist() == expected.tolist()
    assert prepack_report(model).layers == 211


# What asks for the plain weights, and what does not


def ask_nothing(model):
    assert model.num_parameters() > 0
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert repr(model.lm_head.weight).startswith("OnednnWeight")
    assert isinstance(model.lm_head.weight, nn.Parameter)
    assert model.lm_head.weight.nbytes == model.lm_head.weight.numel() * 4


def convert_to_itself(model):
    model.to("cpu").float().to(torch.float32).eval().zero_grad()


def freeze(model):
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.requires_grad_(True)
    assert all(parameter.requires_grad for parameter in model.parameters())


def copy_deeply(model):
    made = copy.deepcopy(model)
    assert_same_weights(made, tiny_models.make("llama"))
    made.lm_head.weight.data.zero_()


def pickle(model):
    buffer = io.BytesIO()
    torch.save(model.lm_head, buffer)
    buffer.seek(0)
    assert_same_weights(torch.load(buffer, weights_only=False), tiny_models.make("llama").lm_head)


def adapt(model):
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).unload()


def vectorize(model):
    with torch.no_grad():
        torch.vmap(model.lm_head)(X)


LEAVES_IT_PACKED = [ask_nothing, convert_to_itself, freeze, copy_deeply, pickle, adapt]


@needs_onednn
@pytest.mark.parametrize("ask", LEAVES_IT_PACKED, ids=lambda ask: ask.__name__)
def test_what_needs_no_numbers_or_a_copy_leaves_a_model_packed(model, ask):
    expected = generate(tiny_models.make("llama"))
    ask(model)
    assert prepack_report(model).layers == 15
    assert generate(model) == expected


def save(model, folder):
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def keep_state_and_edit(model, folder):
    """What state_dict() hands out is the model's own memory, as without packing."""
    model.state_dict()["model.layers.0.mlp.up_proj.weight"].zero_()
    return model


def load_other_weights(model, folder):
    state = {name: tensor + 0.125 for name, tensor in tiny_models.make("llama").state_dict().items()}
    model.load_state_dict(state)
    return model


def add_to_data(model, folder):
    model.model.layers[0].mlp.up_proj.weight.data += 0.25
    return model


@torch.no_grad()
def add_in_place(model, folder):
    model.lm_head.weight.mul_(-1)
    return model


@torch.inference_mode()
def write_rows(model, folder):
    model.lm_head.weight[3:5] = 1.0
    return model


def train(model, folder):
    """An optimizer that was made while the weights were packed."""
    optimizer = torch.optim.SGD(model.requires_grad_(True).parameters(), lr=0.5)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        model(**INPUTS, labels=INPUTS["input_ids"]).loss.backward()
        optimizer.step()
    return model.eval()


def merge_adapter(model, folder):
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=True))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.25)
        elif "lora_A" in name:
            parameter.data.fill_(0.125)
    return wrapped.merge_and_unload()


def convert(model, folder):
    return model.to(torch.float64)


CHANGES = [save, keep_state_and_edit, load_other_weights, add_to_data, add_in_place, write_rows, train, merge_adapter]


@needs_onednn
@pytest.mark.parametrize("change", [*CHANGES, convert], ids=lambda change: change.__name__)
def test_whoever_changes_weights_finds_plain_ones_and_the_model_computes_with_the_changed(model, change, tmp_path):
    expected = change(tiny_models.make("llama"), tmp_path / "theirs")
    found = change(model, tmp_path / "ours")
    with torch.no_grad():
        ours, theirs = found(**INPUTS).logits, expected(**INPUTS).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    unprepack(model)
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), weight, rtol=1e-6, atol=1e-6)


@needs_onednn
def test_a_model_that_was_saved_is_plain_until_it_is_packed_again(model):
    model.state_dict()
    report = prepack_report(model)
    assert (report.layers, report.nbytes) == (0, 0)
    assert report.skipped == {"something asked for the plain weight": 15}
    assert prepack(model).layers == 15


@needs_onednn
def test_a_forward_with_gradients_gives_those_of_the_plain_model(model, plain):
    for each in (model, plain):
        each.requires_grad_(True)(**INPUTS, labels=INPUTS["input_ids"]).loss.backward()
    for name, weight in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, weight.grad), name


@needs_onednn
def test_weights_frozen_for_an_adapter_pass_gradients_on(model):
    model.requires_grad_(False)
    x = X.clone().requires_grad_()
    model.lm_head(x).sum().backward()
    assert x.grad.abs().sum() > 0


@needs_onednn
def test_autocast_gives_its_own_dtype(model, plain):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.lm_head(X), plain.lm_head(X))


@needs_onednn
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_gives_what_it_gives(model, plain):
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(model.lm_head)(X), plain.lm_head(X), rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.filterwarnings("ignore")
def test_tracing_is_refused_with_the_remedy(model):
    with pytest.raises(hfpaged.UnsupportedModelError, match="unpatch the model before"):
        torch.jit.trace(model.lm_head, X)
    hfpaged.unpatch(model)
    assert torch.jit.trace(model.lm_head, X)(X).shape == (3, 5, tiny_models.VOCAB)


@needs_onednn
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_gives_the_same_tokens(always, when):
    model = tiny_models.make("llama")
    expected = generate(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    if when == "before":
        prepack(model)
    assert generate(compiled) == expected
    if when == "after":
        prepack(model)
    assert generate(compiled) == expected
    unprepack(model)
    assert generate(compiled) == expected
    torch._dynamo.reset()


@needs_onednn
def test_a_weight_that_somebody_refers_to_weakly_later_gets_a_successor(model, plain):
    weight = model.lm_head.weight
    reference = weakref.ref(weight)
    model.lm_head.weight.data.zero_()
    assert type(model.lm_head.weight) is nn.Parameter
    assert reference() is weight
    assert not weight.any()  # who still has the old one sees what became of it
    assert not model.lm_head(X).any()
    with torch.no_grad():
        weight.fill_(1.0)
    assert (model.lm_head.weight == 1.0).all()


@needs_onednn
def test_operations_that_come_round_the_python_interface_see_the_plain_weight(model, plain):
    expected = torch.ops.aten.sum(plain.lm_head.weight)
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(torch.ops.aten.sum(model.lm_head.weight), expected)
    assert type(model.lm_head.weight) is nn.Parameter


# Heads that are tied to the embedding


@needs_onednn
def test_a_tied_head_is_packed_beside_the_embedding_and_stays_tied(tied):
    weight = tied.lm_head.weight
    assert weight is tied.model.embed_tokens.weight
    assert isinstance(weight, OnednnWeight)
    assert prepack_report(tied).copied_nbytes == weight.nbytes
    assert generate(tied) == generate(tiny_models.make("llama", tie_word_embeddings=True))
    assert isinstance(tied.lm_head.weight, OnednnWeight)
    unprepack(tied)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert type(tied.lm_head.weight) is nn.Parameter


@needs_onednn
def test_one_row_written_into_a_tied_embedding_is_seen_by_its_head(tied):
    plain = tiny_models.make("llama", tie_word_embeddings=True)
    for each in (tied, plain):
        each.get_input_embeddings().weight.data[7] = 2.0
    with torch.no_grad():
        assert torch.equal(tied.lm_head(X), plain.lm_head(X))
        assert torch.equal(tied.model.embed_tokens(torch.tensor([7])), plain.model.embed_tokens(torch.tensor([7])))


@needs_onednn
def test_a_tied_head_takes_few_rows_by_the_order_that_is_faster(monkeypatch):
    monkeypatch.setattr(
        prepack_file,
        "measure",
        lambda weights, rows, is_tied: LinearGain(
            tuple(weights[0].shape), weights[0].dtype, times(0.5, 2, 2, 2), is_tied=is_tied
        ),
    )
    multiplied = []
    real = onednn_weight.multiply
    monkeypatch.setattr(onednn_weight, "multiply", lambda x, *rest: multiplied.append(x.shape) or real(x, *rest))
    model = tiny_models.make("llama", tie_word_embeddings=True)
    prepack(model, copied_share=1.0)
    with torch.no_grad():
        model.lm_head(X[0])
        assert multiplied == []
        model.lm_head(X)
    assert multiplied == [X.shape]


@needs_onednn
def test_a_tied_head_of_too_large_a_share_stays_plain(always):
    model = tiny_models.make("llama", tie_word_embeddings=True)
    report = prepack(model, copied_share=0.1)
    assert (report.layers, report.copied_nbytes) == (14, 0)
    ((reason, count),) = report.skipped.items()
    assert "copied_share" in reason
    assert count == 1


# Memory


@needs_onednn
def test_a_model_never_lies_in_memory_twice(always, monkeypatch):
    """16 layers of 16 MiB: at no time are more than a few of them in memory twice. The allocator keeps some of what it
    was given back, more or less of it; a copy of everything would be all of it.
    """
    config = {"hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 1, "head_dim": 128}
    model = tiny_models.make("llama", **config, num_attention_heads=16, num_key_value_heads=16)
    model.model.layers[0].mlp.more = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(9))
    process, seen, real = psutil.Process(), [], prepack_file.pack
    monkeypatch.setattr(prepack_file, "pack", lambda *args: (seen.append(process.memory_info().rss), real(*args)))
    before = process.memory_info().rss
    report = prepack(model)
    large = 16 * 2048 * 2048 * 4
    assert report.nbytes > large
    assert max(seen) - before < large / 2
    assert process.memory_info().rss - before < large / 2


# What is not packed


class OwnLinear(nn.Linear):
    pass


def in_training(model):
    model.train()


def on_meta(model):
    model.to("meta")


def with_gradient(model):
    model.requires_grad_(True)(**INPUTS, labels=INPUTS["input_ids"]).loss.backward()


def of_a_subclass(model):
    for module in layers(model):
        module.__class__ = OwnLinear


def in_float64(model):
    model.to(torch.float64)


def held_elsewhere(model):
    model.elsewhere = [parameter.data for parameter in model.parameters()]


def referred_to_weakly(model):
    model.references = [weakref.ref(parameter) for parameter in model.parameters()]


def quantized(model):
    library = pytest.importorskip("torchao.quantization", reason="torchao cannot be imported")
    library.quantize_(model, library.Int8WeightOnlyConfig())


REFUSED = {
    in_training: "model.eval()",
    on_meta: "on meta",
    with_gradient: "has a gradient",
    of_a_subclass: "OwnLinear is not nn.Linear itself",
    in_float64: "of torch.float64",
    held_elsewhere: "belongs to other tensors",
    referred_to_weakly: "weak reference",
    quantized: "not a plain tensor",
}


@needs_onednn
@pytest.mark.parametrize("prepare", REFUSED, ids=lambda prepare: prepare.__name__)
def test_what_cannot_be_packed_says_why(always, plain, prepare):
    prepare(plain)
    report = prepack(plain)
    assert report.layers == 0
    assert not is_prepacked(plain)
    assert sum(report.skipped.values()) == 15
    ((reason, _),) = report.skipped.items()
    assert REFUSED[prepare] in reason
    assert reason in str(report)


def test_without_the_operations_of_onednn_nothing_is_packed(always, plain, monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    (reason,) = prepack(plain).skipped
    assert "mkldnn" in reason or "without oneDNN" in reason


def test_switched_off_onednn_is_not_used(always, plain):
    with torch.backends.mkldnn.flags(enabled=False):
        (reason,) = prepack(plain).skipped
    assert "without oneDNN" in reason


@needs_onednn
def test_a_dtype_that_this_cpu_has_no_kernel_for_stays_plain(plain, monkeypatch):
    def refuse(*args):
        raise RuntimeError("no such instructions\nat line 3")

    monkeypatch.setattr(prepack_file, "measure", refuse)
    assert prepack(plain).skipped == {"oneDNN refuses torch.float32 here: no such instructions": 15}


@needs_onednn
def test_an_order_that_does_not_give_back_its_bits_is_not_kept(always, plain, monkeypatch):
    monkeypatch.setattr(prepack_file, "reordered", lambda weight: onednn_weight.reordered(weight + 1e-3))
    original = copy.deepcopy(plain)
    assert prepack(plain).skipped == {"oneDNN does not give back its bits": 15}
    assert_same_weights(plain, original)


@needs_onednn
def test_a_compiled_model_is_refused_by_name(always, plain):
    (reason,) = prepack(torch.compile(plain, backend="eager")).skipped
    assert "torch.compile" in reason


# Measured before it is kept


@needs_onednn
def test_each_shape_is_timed_with_all_rows_and_a_prefill():
    found = measure([torch.randn(64, 32) for _ in range(3)], rows=(8, 2))
    assert (found.shape, found.dtype, found.layers) == ((64, 32), torch.float32, 0)
    assert [time.rows for time in found.times] == [2, 8, 256]
    assert all(time.plain > 0 and time.packed > 0 for time in found.times)


GAINS = [
    (times(0.9, 2.0, 2.0, 1.0), True, 8),
    (times(2.0, 2.0, 2.0, 0.5), False, 1),  # a prefill takes twice as long
    (times(0.5, 0.9, 0.9, 1.0), False, None),
    (times(1.0, 1.0, 1.05, 1.0), False, 32),  # less than what is worth it
    (times(2.0, 0.9, 2.0, 1.0), True, 32),
    (times(0.8, 4.0, 4.0, 1.0), False, 8),  # a single row would lose too much
]


@pytest.mark.parametrize(("measured", "is_gain", "min_rows"), GAINS)
def test_the_sum_of_decode_steps_decides_unless_one_or_a_prefill_gets_slow(measured, is_gain, min_rows):
    gain = LinearGain((4, 4), torch.float32, measured)
    assert (gain.is_gain, gain.min_rows) == (is_gain, min_rows)


def test_a_tied_head_needs_a_gain_at_some_rows_only_and_tells_it_as_it_runs():
    gain = LinearGain((4, 4), torch.float32, times(0.5, 2.0, 2.0, 1.0), is_tied=True)
    assert gain.is_gain
    assert (gain.at(1).gain, gain.at(8).gain) == (1.0, 2.0)
    assert not LinearGain((4, 4), torch.float32, times(0.5, 0.5, 0.5, 1.0), is_tied=True).is_gain


@needs_onednn
def test_layers_without_a_gain_stay_plain_and_the_report_tells_the_others_gains(plain, monkeypatch):
    def measured(weights, rows, is_tied):
        gain = 4.0 if tuple(weights[0].shape) == (64, 48) else 0.5
        return LinearGain(tuple(weights[0].shape), weights[0].dtype, times(gain, gain, gain, 1.0))

    monkeypatch.setattr(prepack_file, "measure", measured)
    report = prepack(plain)
    assert report.layers == 4  # gate and up of two layers
    assert report.skipped == {"no gain was measured": 11}
    assert (report.gain(8), report.gain(256)) == (4.0, 1.0)
    assert "4 linear layers" in str(report)
    assert "8: 4.00x" in str(report)
    with pytest.raises(KeyError):
        report.gain(5)


# As a patch


@needs_onednn
def test_patch_packs_and_unpatch_unpacks(always, plain):
    expected = generate(plain)
    original = copy.deepcopy(plain)
    assert hfpaged.patch(plain, prepack=True) is plain
    assert is_prepacked(plain)
    assert generate(plain, **{CACHE: hfpaged.PagedCache(plain)}) == expected
    hfpaged.unpatch(plain)
    assert not is_prepacked(plain)
    assert_same_weights(plain, original)


@needs_onednn
@pytest.mark.parametrize("before", ["plain", "patched", "packed"])
def test_patched_leaves_a_model_as_it_was(always, plain, before):
    if before != "plain":
        hfpaged.patch(plain, prepack=before == "packed")
    with hfpaged.patched(plain, prepack=True):
        assert is_prepacked(plain)
    assert is_prepacked(plain) == (before == "packed")
    assert is_patched(plain) == (before != "plain")


# The prefix cache


@needs_onednn
def test_a_packed_model_finds_the_prefixes_of_the_plain_one(always, plain):
    fingerprint = model_keys(plain)
    cache = hfpaged.PagedCache(plain, num_blocks=64, block_size=4)
    pool, expected = cache.pool, generate(plain, **{CACHE: cache})
    prepack(plain)
    assert model_keys(plain) == fingerprint
    assert generate(plain, **{CACHE: hfpaged.PagedCache(plain, pool=pool)}) == expected
    assert pool.stats().prefix_hits > 0
    assert prepack_report(plain).layers == 15
    plain.lm_head.weight.data += 1
    assert model_keys(plain) != fingerprint
    hfpaged.unpatch(plain)


# The batcher


@needs_onednn
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_batcher_packs_keeps_it_over_its_steps_and_gives_the_plain_weights_back(always, is_tied):
    model = tiny_models.make("llama", tie_word_embeddings=is_tied)
    prompts = [[5, 6, 7, 8, 9], [11, 12], list(range(20, 50))]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    batcher = hfpaged.ContinuousBatcher(model, num_blocks=64, prepack=True)
    packed = prepack_report(model).layers
    assert packed >= 14
    assert [
        list(output.token_ids) for output in batcher.generate(prompts, max_new_tokens=8, do_sample=False)
    ] == expected
    assert prepack_report(model).layers == packed
    batcher.close()
    assert not is_prepacked(model)
    hfpaged.unpatch(model)
