"""Every causal model type of transformers: the tokens of a PagedCache are those of the model's own cache, and
`hfpaged support` says beforehand what then happens.
"""

from __future__ import annotations

import family_readme
import pytest
import transformers
from family_models import MODEL_TYPES, build, config_of
from family_runs import measure

from hfpaged import attention
from hfpaged.layer_step import LayerStep
from hfpaged.verdict import CORRECT, FAST, NO_CACHE, REFUSED, examine

RECORD = family_readme.recorded()
IS_RECORDED = RECORD["transformers"] == transformers.__version__


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.timeout(300)  # the first models compile the kernels
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_family_generates_the_tokens_of_its_own_cache_and_support_foretells_how(model_type):
    model = build(model_type)
    run = measure(model)
    assert run.faults == []
    verdict = examine(config_of(model_type))
    assert verdict.outcome == run.outcome, verdict
    assert verdict.works == (run.outcome in (FAST, CORRECT))
    if run.outcome in (REFUSED, NO_CACHE):
        assert verdict.reasons == (run.reason,)
    if IS_RECORDED:
        recorded = RECORD["families"][model_type]
        assert recorded == {"outcome": run.outcome, "reasons": list(verdict.reasons)}, "run tests/family_readme.py"


def test_what_transformers_itself_cannot_generate_is_known_by_name():
    """Without its own cache there is nothing to compare with: every mode of these fails in transformers."""
    helpless = {"blt", "gemma4_assistant", "gemma4_unified_assistant"} & set(MODEL_TYPES)
    for model_type in helpless:
        run = measure(build(model_type))
        assert len(run.impossible) == 4
        assert run.outcome == NO_CACHE


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
def test_wrong_numbers_are_found(monkeypatch, is_patched):
    """The comparison above can fail."""
    if is_patched:
        paged = attention._paged
        monkeypatch.setattr(attention, "_paged", lambda *given: paged(*given) * 1.01)
    else:
        dense = LayerStep.dense
        monkeypatch.setattr(LayerStep, "dense", lambda *given: dense(*given) * 1.01)
    run = measure(build("llama"))
    word = "patched" if is_patched else "unpatched"
    assert {fault.split(":")[0] for fault in run.faults} == {
        f"{mode}, {word}" for mode in ("greedy", "padded", "sampled", "beams")
    }


def test_a_dense_view_is_found(monkeypatch):
    monkeypatch.setattr(attention, "_why_dense", lambda *given: "a test")
    run = measure(build("llama"))
    assert run.faults == []
    assert run.outcome == CORRECT


def test_the_record_is_of_all_families_and_meets_the_goals():
    outcomes = [family["outcome"] for family in RECORD["families"].values()]
    with_keys = len(outcomes) - outcomes.count(NO_CACHE)
    fast, correct = outcomes.count(FAST), outcomes.count(CORRECT)
    assert fast + correct >= 0.95 * with_keys
    assert fast >= 0.75 * with_keys
    if IS_RECORDED:
        assert set(RECORD["families"]) == set(MODEL_TYPES)


def test_the_readme_tells_what_was_recorded():
    readme = family_readme.README.read_text()
    assert readme == family_readme.with_families(readme, family_readme.generated(RECORD)), (
        "run: python tests/family_readme.py"
    )


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="families:begin"):
        family_readme.with_families("# a project\n", "")
