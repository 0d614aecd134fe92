"""Every causal model type of transformers: prompts that the batcher computes together get the tokens that generate()
gives to each of them alone with the model's own cache.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from family_models import MODEL_TYPES, build
from family_readme import recorded
from tiny_configs import VOCAB

import hfpaged
from hfpaged import ContinuousBatcher
from hfpaged.engine.model_runner import ModelRunner
from hfpaged.errors import UnsupportedModelError
from hfpaged.verdict import NO_CACHE, REFUSED

RECORD = recorded()
IS_RECORDED = RECORD["transformers"] == transformers.__version__
GREEDY = {"max_new_tokens": 6, "do_sample": False}
LENGTHS = (5, 17, 9)  # longer than the windows and chunks of the tiny configs, and than what a step has room for
SIZES = {"block_size": 4, "num_blocks": 400, "max_num_batched_tokens": 24, "max_num_seqs": 8, "prepack": False}

# What becomes of all others is "packed": several sequences in one forward.
NO_PLAIN_TOKENS = "cpmant musicgen musicgen_melody xlm"  # a prompt of its own, codebooks, a mask token at the end
STATE_IN_MODULES = "recurrent_gemma"
STATES = """
    axk2 bailing_hybrid bamba deepseek_v32 dots3_note dots3_note_text falcon_h1 glm_moe_dsa granitemoehybrid hy_v4
    inkling2_loop_text inkling2_text inkling_text jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3 minimax_m3_vl_text
    mllama nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp
    qwen4_exp_text zamba zamba2 zaya
"""
NO_POSITIONS = """
    bart bigbird_pegasus blenderbot blenderbot-small bloom marian mbart moss_transcribe_diarize mpt mvp pegasus
    plbart prophetnet roformer trocr whisper
"""
DENSE_VIEWS = """
    axk1 big_bird deepseek_v2 deepseek_v3 diffllama doge falcon git glm4_moe_lite gpt_neo gpt_neox_japanese jetmoe
    llama4 llama4_text longcat_flash megatron-bert minicpm3 moshi rembert sarvam_mla xglm youtu
"""
ONE_BY_ONE = {*STATES.split(), *NO_POSITIONS.split(), *DENSE_VIEWS.split()}
REFUSED_HERE = {*NO_PLAIN_TOKENS.split(), *STATE_IN_MODULES.split()}
WHOLE_PROMPTS = {"jamba", "zamba", "prophetnet"}


pytestmark = pytest.mark.usefixtures("one_thread")


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB - 10, (length,), generator=generator).tolist() for length in lengths]


def alone(model, prompt):
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, len(prompt) :].tolist()


def expected_forward(model_type):
    if model_type in REFUSED_HERE or RECORD["families"][model_type]["outcome"] in (REFUSED, NO_CACHE):
        return "refused"
    return "one by one" if model_type in ONE_BY_ONE else "packed"


def run(model):
    """(how the batcher computes the model, the tokens of a first and of a second run, what `describe` says)"""
    try:
        batcher = ContinuousBatcher(model, **SIZES)
    except UnsupportedModelError:
        return "refused", [], {}
    with batcher:
        runs = [batcher.generate(prompts(), **GREEDY) for _ in range(2)]  # of the second, prefixes are known
        told = batcher.describe()
        batcher.pool.check_integrity()
        assert batcher.pool.num_free == batcher.pool.num_blocks
    hfpaged.unpatch(model)
    assert [output.error for outputs in runs for output in outputs] == [None] * 2 * len(LENGTHS)
    assert told["prefix_sharing"] or not any(output.num_cached_tokens for output in runs[1])
    return told["forward"].split(" (")[0], [[output.token_ids for output in outputs] for outputs in runs], told


@pytest.mark.timeout(300)  # the first models compile the kernels
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_prompts_together_get_the_tokens_of_each_alone(model_type):
    model = build(model_type)
    forward, runs, told = run(model)
    if forward != "refused":
        wanted = [alone(model, prompt) for prompt in prompts()]
        assert runs == [wanted, wanted]
    if IS_RECORDED:
        assert forward == expected_forward(model_type)
        assert (told.get("prompts") == "whole") == (model_type in WHOLE_PROMPTS)


def test_nearly_all_families_with_keys_can_be_batched_and_most_are_packed():
    """What the test above finds, counted."""
    outcomes = [family["outcome"] for family in RECORD["families"].values()]
    with_keys = len(outcomes) - outcomes.count(NO_CACHE)
    found = [expected_forward(model_type) for model_type in RECORD["families"]]
    packed, single = found.count("packed"), found.count("one by one")
    assert (packed, single, with_keys) == (107, 71, 185)
    assert {*ONE_BY_ONE, *REFUSED_HERE} <= set(RECORD["families"])


def test_a_wrong_forward_is_found(monkeypatch):
    """The comparison above can fail."""
    logits = ModelRunner._logits
    monkeypatch.setattr(ModelRunner, "_logits", lambda *given: logits(*given).roll(1, -1))
    model = build("llama")
    _, (first, _), _ = run(model)
    assert first != [alone(model, prompt) for prompt in prompts()]
