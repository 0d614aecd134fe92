from __future__ import annotations

import copy
import time
from array import array

import pytest
import tiny_models
import torch
from family_models import build

import hfpaged
from hfpaged import adapters, compat
from hfpaged.block_hash import ExtraKey
from hfpaged.block_table import GONE
from hfpaged.explain import explain_match, explain_prompt
from hfpaged.match_end import match_end
from hfpaged.prefix_index import PrefixIndex

BLOCK = 8
RULES = "\nRules: answer in short words. Never guess. Be kind."
DOG, OPEN = "\nQ: may a dog come in?", "\nQ: when do you open?"


class Letters:
    """A tokenizer of one token per letter."""

    def encode(self, text):
        return [98 if letter == "\n" else ord(letter) - 29 for letter in text]

    def decode(self, token_ids):
        return "".join("\n" if token == 98 else chr(int(token) + 29) for token in token_ids)


LETTERS = Letters()


def prompt(clock, question, rules=RULES):
    return LETTERS.encode(f"You help.\nIt is {clock} now." + rules + question)


class House:
    """A tiny model, and one pool for all that it generates."""

    def __init__(self, name="llama", **size):
        self.model = tiny_models.make(name)
        self.pool = None
        self._size = size or {"num_blocks": 200}

    def ask(self, rows, new_tokens=BLOCK + 1, **settings):
        """Generate behind rows of token ids of one length, a block by default, so that all of them is published."""
        size = {"pool": self.pool} if self.pool else self._size | {"block_size": BLOCK}
        cache = hfpaged.PagedCache(self.model, **size, **settings)
        self.pool = cache.pool
        ids = torch.tensor(rows if isinstance(rows[0], list) else [rows])
        named = {compat.cache_argument(): cache}
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            **named,
        )
        return cache

    def last(self, rows, **settings):
        return self.ask(rows, **settings).explain_last(LETTERS)[0]


@pytest.fixture
def house():
    return House()


def test_a_time_in_the_second_line_is_told_with_what_it_costs(house):
    house.ask(prompt("16:58:09", DOG))
    ids = prompt("16:58:48", OPEN)
    report = house.pool.explain(ids, LETTERS)
    at = len("You help.\nIt is 16:58:")
    same = len(" now." + RULES + "\nQ: ")
    difference = report.difference
    assert report.reason == "differs"
    assert (report.query_tokens, report.known_tokens, report.hit_tokens) == (len(ids), at, at)
    assert (difference.position, difference.here_token, difference.known_token) == (at, ids[at], ids[at] - 4)
    assert (difference.here_text, difference.known_text, difference.kind) == ("16:58:48", "16:58:09", "time")
    assert difference.here_context == "s 16:58:48 now.\n"
    assert difference.known_context == "s 16:58:09 now.\n"
    assert (difference.same_behind, difference.num_runs) == (same, 1)
    assert str(report) == (
        f"{at} of {len(ids)} prompt tokens are known: it first differs at token {at}: '16:58:48' (here) vs "
        f"'16:58:09' (known): a time; {same} more tokens behind it are the same and would be found if it stood behind "
        "them"
    )


def test_the_admitted_prompt_is_explained_as_of_then_not_as_of_now(house):
    house.ask(prompt("16:58:09", DOG))
    ids = prompt("16:58:48", OPEN)
    before = house.pool.explain(ids, LETTERS)
    cache = house.ask(ids)
    assert cache.explain_last(LETTERS) == [before]
    assert house.pool.explain(ids, LETTERS).reason == "complete"
    house.ask(prompt("16:58:41", DOG))  # more like the prompt than what was known when it came
    house.pool.drop_prefixes()
    assert cache.explain_last(LETTERS) == [before]


@pytest.mark.parametrize("length", [20, 35, 51])
def test_the_saved_tokens_are_those_that_a_prompt_with_its_date_behind_finds(length):
    """The rules are cut to some lengths, so that they end at different places of a block."""

    def moved(clock, question):
        return LETTERS.encode("You help.\nIt is  now." + RULES[:length] + f"Time: {clock}" + question)

    plain, better = House(), House()
    plain.ask(prompt("09:30", DOG, RULES[:length]))
    difference = plain.last(prompt("16:58", OPEN, RULES[:length])).difference
    better.ask(moved("09:30", DOG))
    found = better.last(moved("16:58", OPEN)).hit_tokens
    start = len("You help.\nIt is ")
    assert difference.position == start
    assert (found - start) // BLOCK * BLOCK - BLOCK <= difference.saved_tokens <= found - start
    assert difference.saved_tokens > 0
    assert (start + difference.saved_tokens) % BLOCK == 0


def test_two_places_that_differ_are_counted(house):
    text = "You help.\nIt is {} now." + RULES + " You are on call {} and must tell nobody of it." + "{}"
    house.ask(LETTERS.encode(text.format("09:30", 7, "\nQ: A")), new_tokens=1)
    report = house.last(LETTERS.encode(text.format("16:58", 8, "\nQ: B")))
    difference = report.difference
    assert difference.num_runs == 2
    assert difference.same_behind == len(text.format("", "", "\nQ: ")) - len("You help.\nIt is ")
    assert "would be found if it and what else differs before them (2 places) stood behind" in str(report)


def test_without_a_long_run_behind_it_nothing_is_promised(house):
    house.ask(LETTERS.encode("The quick brown fox jumps over it"))
    report = house.last(LETTERS.encode("The quick brown dog is not amused"))
    assert (report.difference.here_text, report.difference.known_text) == ("dog", "fox")
    assert report.difference.kind is None
    assert (report.difference.same_behind, report.difference.saved_tokens) == (0, 0)
    assert str(report).endswith("'dog' (here) vs 'fox' (known); no long run of tokens behind it is the same")


def test_without_a_tokenizer_the_token_ids_are_told(house):
    house.ask(prompt("16:58:09", DOG))
    ids = prompt("16:58:48", OPEN)
    report = house.pool.explain(ids)
    difference = report.difference
    assert (difference.here_text, difference.known_text, difference.here_context, difference.kind) == (None,) * 4
    assert f"it first differs at token {difference.position}: 23 (here) vs 19 (known); " in str(report)
    assert difference.saved_tokens == house.pool.explain(ids, LETTERS).difference.saved_tokens > 0


def test_a_prompt_that_nobody_began_like_was_never_seen(house):
    first = house.ask(prompt("09:30", DOG)).explain_last(LETTERS)[0]
    other = house.last(LETTERS.encode("Another prompt altogether"))
    for report in (first, other):
        assert (report.reason, report.known_tokens, report.difference) == ("never seen", 0, None)
        assert str(report).endswith(": no known prompt begins like this one")


def test_what_goes_on_behind_all_that_is_known_was_never_seen(house):
    ids = prompt("09:30", DOG)
    house.ask(ids[: 4 * BLOCK], new_tokens=1)
    report = house.last(ids)
    assert (report.reason, report.known_tokens) == ("never seen", 4 * BLOCK)
    assert str(report) == f"{4 * BLOCK} of {len(ids)} prompt tokens are known: nothing known goes on behind them"


def test_what_fills_no_block_is_not_kept(house):
    ids = prompt("09:30", DOG)
    house.ask(ids[:5], new_tokens=1)
    short = house.last(ids[:5], new_tokens=1)
    assert (short.reason, short.known_tokens) == ("below block size", 0)
    assert str(short) == "0 of 5 prompt tokens are known: they fill no block of 8, and only full blocks are kept"
    house.ask(ids[: 2 * BLOCK + 5], new_tokens=1)
    longer = house.last(ids[: 2 * BLOCK + 5], new_tokens=1)
    assert (longer.reason, longer.known_tokens) == ("below block size", 2 * BLOCK)
    assert str(longer).endswith("the 5 behind them fill no block of 8, and only full blocks are kept")


def test_of_a_known_prompt_the_last_token_is_computed(house):
    ids = prompt("09:30", DOG)
    house.ask(ids)
    report = house.last(ids)
    assert (report.reason, report.known_tokens, report.hit_tokens) == ("complete", len(ids) - 1, len(ids) - 1)
    assert str(report).endswith("all but the last 1, which must be computed for the logits")


def test_an_evicted_prompt_is_told_with_the_time(house):
    ids = prompt("09:30", DOG)
    house.ask(ids)
    house.pool.prefixes.index.clock = lambda: 1_700_000_000.0
    house.pool.drop_prefixes()
    report = house.pool.explain(ids, LETTERS)
    full = len(ids) // BLOCK * BLOCK
    assert (report.reason, report.known_tokens, report.evicted_at) == ("evicted", 0, 1_700_000_000.0)
    assert report.lost_tokens == (len(ids) - 1) // BLOCK * BLOCK == full
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_000))
    assert f"{full} more were known until a block was evicted at {when}; a larger pool keeps them longer, " in str(
        report
    )
    cache = house.ask(ids)  # publishes it again
    assert cache.explain_last(LETTERS) == [report]
    assert house.pool.explain(ids, LETTERS).reason == "complete"
    cache.free()
    house.pool.prefixes.index.clock = lambda: 1_800_000_000.0
    house.pool.drop_prefixes()
    assert cache.explain_last(LETTERS) == [report]
    assert house.pool.explain(ids, LETTERS).evicted_at == 1_800_000_000.0


def test_the_evicted_tail_of_a_known_prompt_is_told():
    ids = prompt("09:30", DOG)
    house = House(num_blocks=len(ids) // BLOCK + 3)
    house.ask(ids, new_tokens=1)
    house.ask(LETTERS.encode("Something else that needs some blocks"), new_tokens=1)  # 5, and 3 were left
    report = house.last(ids, new_tokens=1)
    assert (report.reason, report.known_tokens) == ("evicted", (len(ids) // BLOCK - 2) * BLOCK)
    assert report.lost_tokens == 2 * BLOCK
    assert time.time() - 600 < report.evicted_at <= time.time()


def test_the_evicted_end_of_a_prompt_inside_of_a_block_is_told(house):
    ids = prompt("09:30", DOG)
    house.ask(ids[: 4 * BLOCK], new_tokens=1)
    house.pool.blocks._released.append(house.pool.blocks._evict())  # the least recently used: the tail
    cut = ids[: 3 * BLOCK + 5]
    report = house.last(cut, new_tokens=1)
    assert (report.reason, report.known_tokens, report.lost_tokens) == ("evicted", 3 * BLOCK, 4)


def test_another_salt_is_named_but_not_told(house):
    ids = prompt("09:30", DOG)
    house.ask(ids, salt="tenant-a-7781")
    for salt in (None, "tenant-b"):
        report = house.pool.explain(ids, LETTERS, salt=salt)
        assert (report.reason, report.differing_keys, report.known_tokens) == ("other key", ("salt",), 0)
        assert report.other_tokens == (len(ids) - 1) // BLOCK * BLOCK
        assert str(report).endswith(f"{report.other_tokens} are known under another salt, which is never shared")
        assert "7781" not in str(report) + repr(report)
        assert house.ask(ids, salt=salt).explain_last(LETTERS) == [report]
    assert house.pool.explain(ids, LETTERS, salt="tenant-a-7781").reason == "complete"
    assert house.pool.explain(ids, LETTERS, salt="tenant-c").reason == "other key"


def test_two_caches_that_began_before_either_published_know_each_other():
    index = PrefixIndex([None], 4)
    mine, theirs = index.root([]), index.root([])
    index.publish(theirs, array("q", [1, 2, 3, 4]), [0])
    items = array("q", [1, 2, 3, 9, 9])
    end = match_end(index, mine, items, 4, index.match(mine, items, 4))
    report = explain_match(index, mine, items, end).report
    assert (report.reason, report.known_tokens, report.difference.position) == ("differs", 3, 3)


def test_what_another_salt_publishes_later_did_not_count(house):
    ids = prompt("09:30", DOG)
    cache = house.ask(ids, salt="tenant-a")
    house.ask(ids, salt="tenant-b")
    assert cache.explain_last(LETTERS)[0].reason == "never seen"
    assert house.pool.explain(ids, LETTERS).differing_keys == ("salt",)


def test_texts_of_other_salts_are_not_shown(house):
    house.ask(prompt("16:58:09", DOG), salt="tenant-a")
    report = house.pool.explain(prompt("16:58:48", OPEN), LETTERS, salt="tenant-b")
    assert report.reason == "other key"
    assert report.difference is None
    assert "16:58" not in str(report)


def test_an_evicted_prompt_of_another_salt_does_not_count(house):
    ids = prompt("09:30", DOG)
    house.ask(ids, salt="tenant-a")
    house.pool.drop_prefixes()
    assert house.pool.explain(ids, LETTERS).reason == "never seen"


def test_a_longer_match_under_another_salt_is_told_before_the_own_short_one(house):
    house.ask(prompt("09:30", DOG), salt="tenant-a")
    house.ask(prompt("16:58", DOG))
    report = house.pool.explain(prompt("09:30", OPEN), LETTERS)
    assert (report.reason, report.differing_keys) == ("other key", ("salt",))
    assert report.known_tokens == len("You help.\nIt is ")


def test_adapters_are_told_from_each_other(house, monkeypatch):
    ids = prompt("09:30", DOG)
    active = []
    monkeypatch.setattr(adapters, "active_adapters", lambda model: tuple(active))
    house.ask(ids)
    active.append("poet")
    report = house.last(ids)
    assert (report.reason, report.differing_keys) == ("other key", ("adapter",))
    assert "are known with another adapter, or with none, which is never shared" in str(report)
    pool = house.pool
    assert pool.explain(ids, adapter="poet").reason == pool.explain(ids).reason == "complete"
    assert pool.explain(ids, adapter="lawyer").differing_keys == ("adapter",)
    both = pool.explain(ids, salt="x", adapter="poet")
    assert both.differing_keys == ("salt",)  # of the two that have all tokens, the root that differs less


def test_other_weights_are_told(house):
    ids = prompt("09:30", DOG)
    house.ask(ids)
    house.model.get_output_embeddings().weight.mul_(1.5)
    report = house.last(ids, publish=False)
    assert (report.reason, report.differing_keys) == ("other key", ("model",))
    assert "are known for other weights of the model, which is never shared" in str(report)
    assert house.pool.explain(ids, LETTERS) == report  # with the weights of the last forward


def state_of(pool):
    index, blocks = pool.prefixes.index, pool.blocks
    roots = {root.keys: (root.last_use, list(root.children)) for root in index._roots.values()}
    return copy.deepcopy(
        (index.counts, index._uses, index.num_created, roots, list(blocks._cached), blocks._refcounts, blocks._released)
    ), index.last_root


def test_explaining_changes_nothing(house):
    first, second = prompt("16:58:09", DOG), prompt("16:58:48", OPEN)
    cache = house.ask(first, salt="a")
    house.ask(second)
    house.ask(second, publish=False)
    before = state_of(house.pool)
    for ids in (first, second, [5] * 30):
        for salt in (None, "a", "b"):
            house.pool.explain(ids, LETTERS, salt=salt, adapter="none of them")
    cache.explain_last(LETTERS)
    assert state_of(house.pool) == before
    house.pool.check_integrity()


def test_a_colliding_hash_is_not_counted_by_an_explanation():
    index = PrefixIndex([None], 4, hash_function=lambda data: b"same")
    root = index.root([])
    index.publish(root, array("q", [1, 2, 3, 4]), [0])
    assert explain_prompt(index, [1, 2, 3, 5, 6], None, None).report.known_tokens == 3
    assert index.counts.collisions == 0


def test_prompts_come_as_lists_and_tensors_of_one_row(house):
    ids = prompt("09:30", DOG)
    house.ask(ids)
    report = house.pool.explain(ids)
    for same in (tuple(ids), array("q", ids), torch.tensor(ids), torch.tensor([ids])):
        assert house.pool.explain(same) == report
    for wrong in (torch.tensor([ids, ids]), [ids, ids], torch.tensor([[ids]])):
        with pytest.raises(hfpaged.InvalidConfigError, match="are not one prompt"):
            house.pool.explain(wrong)
    empty = house.pool.explain([])
    assert (empty.query_tokens, empty.known_tokens, empty.reason) == (0, 0, "complete")


def test_nothing_is_known_in_a_pool_that_no_forward_has_used():
    model = tiny_models.make("llama")
    cache = hfpaged.PagedCache(model, num_blocks=8)
    assert cache.pool.explain([1, 2, 3] * 9).reason == "never seen"
    assert cache.explain_last() == []


def test_rows_of_a_batch_are_explained_one_by_one(house):
    known, fresh = prompt("09:30", DOG), LETTERS.encode("x" * len(prompt("09:30", DOG)))
    house.ask(known)
    first, second = house.ask([known, fresh]).explain_last(LETTERS)
    assert (first.reason, second.reason) == ("complete", "never seen")
    assert first.known_tokens == len(known) - 1
    assert first.hit_tokens <= first.known_tokens
    counts = house.pool.stats()
    assert counts.prefix_hits == first.hit_tokens


def test_known_tokens_that_are_computed_again_are_told():
    report = hfpaged.PrefixReport(100, 96, 80, "complete", 16)
    assert str(report).startswith(
        "96 of 100 prompt tokens are known (16 of them are computed again, as the rows of a batch are computed "
        "together): "
    )


def test_blocks_that_had_left_their_window_are_told():
    index = PrefixIndex([None, 6], 4)
    parent = index.root([])
    for number in range(5):
        items = array("q", range(4 * number, 4 * number + 4))
        parent = index.publish(parent, items, [2 * number, GONE if number < 3 else 2 * number + 1])
    assert explain_prompt(index, range(22), None, None).report.known_tokens == 20
    report = explain_prompt(index, [*range(12), 77, 78, 79], None, None).report
    assert (report.reason, report.known_tokens, report.lost_tokens) == ("left window", 0, 12)
    assert report.evicted_at is None
    assert "12 more are known, but layers with a window keep only what its end shows" in str(report)
    index.forget(9)  # of the last block in the group with a window
    report = explain_prompt(index, range(22), None, None).report
    assert (report.reason, report.known_tokens, report.lost_tokens) == ("evicted", 0, 20)
    index.publish(parent.parent, parent.items, [GONE, 9])
    assert parent.evicted_at is None
    assert explain_prompt(index, range(22), None, None).report.known_tokens == 20


def test_of_a_windowed_model_the_evicted_beginning_is_missed_only_by_others():
    house = House("mistral")
    ids = prompt("09:30", DOG)
    house.ask(ids)
    blocks = house.pool.prefixes.index.match(house.pool.prefixes.index.last_root, array("q", ids), 40).blocks
    evicted = [entry.blocks[0] for entry in blocks]
    for block in evicted:
        del house.pool.blocks._cached[block]
        house.pool.blocks._cached = {block: None} | house.pool.blocks._cached
    for _ in evicted:
        house.pool.blocks._released.append(house.pool.blocks._evict())
    assert house.pool.explain(ids).reason == "complete"
    report = house.last(ids[:40] + LETTERS.encode("and then another end"))
    assert (report.reason, report.known_tokens, report.lost_tokens) == ("evicted", 0, 40)
    house.pool.check_integrity()


def test_with_several_layer_groups_the_difference_and_the_eviction_are_told():
    house = House("gemma2")
    ids = prompt("09:30", DOG)
    house.ask(ids[:48], new_tokens=1)
    assert len(house.pool.groups) == 2
    changed = [*ids[:48], *LETTERS.encode(" and so on, it ends")]
    grown = house.last(changed, new_tokens=1)
    assert (grown.reason, grown.known_tokens) == ("never seen", 48)
    report = house.pool.explain([*ids[:48], *LETTERS.encode(" and no more ends")], LETTERS)
    assert (report.reason, report.difference.position) == ("differs", 48 + len(" and "))
    assert (report.difference.here_text, report.difference.known_text) == ("no", "so")
    index = house.pool.prefixes.index
    index.clock = lambda: 1_700_000_000.0
    while (report := house.pool.explain(changed, LETTERS)).known_tokens >= 48:  # block by block, of either group
        house.pool.blocks._released.append(house.pool.blocks._evict())
    assert (report.reason, report.evicted_at) == ("evicted", 1_700_000_000.0)
    assert report.known_tokens + report.lost_tokens == len(changed) // BLOCK * BLOCK
    house.pool.check_integrity()


def test_inputs_besides_the_tokens_are_compared(house):
    """With embeddings nothing is known of the tokens but a hash."""
    ids = prompt("09:30", DOG)
    embed = house.model.get_input_embeddings()
    cache = house.ask([5] * 9)

    def last(tokens):
        cache = hfpaged.PagedCache(house.model, pool=house.pool)
        named = {compat.cache_argument(): cache}
        house.model.generate(inputs_embeds=embed(torch.tensor([tokens])), max_new_tokens=2, pad_token_id=0, **named)
        return cache.explain_last(LETTERS)[0]

    assert last(ids).reason == "never seen"
    assert last(ids).reason in ("complete", "below block size")
    report = last([*ids[:30], 7, *ids[31:]])
    assert (report.reason, report.difference.position, report.difference.kind) == ("differs", 30, "input")
    assert report.difference.here_text is None
    assert "what is given with it (positions, types, embeddings) is not" in str(report)
    assert cache.explain_last()[0].reason == "never seen"


def test_token_ids_are_found_under_a_root_with_more_of_each_position():
    index = PrefixIndex([None], 4)
    root = index.root([ExtraKey("model", "m")], width=5)

    def wide(tokens, more=9):
        return array("q", [number for token in tokens for number in (token, more, more, more, more)])

    first = index.publish(root, wide([1, 2, 3, 4]), [0])
    index.publish(first, wide([5, 6, 7, 8]), [1])
    report = explain_prompt(index, [1, 2, 3, 4, 5, 6, 70, 8, 9], None, None).report
    assert (report.known_tokens, report.difference.position) == (6, 6)
    assert (report.difference.here_token, report.difference.known_token) == (70, 7)
    assert explain_prompt(index, [1, 2, 3, 4, 5, 6, 7, 8, 9], None, None).report.reason == "complete"
    items = wide([1, 2, 3, 4, 5], more=8)
    end = match_end(index, root, items, 4, index.match(root, items, 4))
    assert (end.known, end.common, end.lost) == (0, 0, False)
    plain = index.root([ExtraKey("model", "m")])
    items = array("q", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    end = match_end(index, plain, items, 8, index.match(plain, items, 8))
    report = explain_match(index, plain, items, end).report
    assert (report.reason, report.differing_keys, report.other_tokens) == ("other key", ("width",), 8)
    assert "are known with other inputs besides the tokens" in str(report)


def test_of_several_ways_on_the_one_that_is_most_like_the_prompt_is_compared(house):
    """The newest prompt with that date has another end."""
    house.ask(prompt("09:30", DOG), new_tokens=1)
    house.ask(prompt("09:30", DOG, rules="\nAnother set of rules that is not the same."), new_tokens=1)
    difference = house.last(prompt("16:58", DOG)).difference
    assert difference.position == len("You help.\nIt is ")
    assert difference.same_behind >= len(" now." + RULES)


def forward(cache, model, ids, **inputs):
    with torch.no_grad():
        model(input_ids=torch.tensor(ids), use_cache=True, **inputs, **{compat.cache_argument(): cache})
    return cache.explain_last()


def test_a_batch_that_is_not_looked_up_says_why(house):
    house.ask(prompt("09:30", DOG))
    ids = prompt("09:30", DOG)[:20]

    def fresh():
        return hfpaged.PagedCache(house.model, pool=house.pool)

    (report,) = forward(fresh(), house.model, [ids])
    assert (report.reason, report.query_tokens, report.hit_tokens) == ("declined", 20, 0)
    assert report.declined == "the caller may read the logits of the whole prompt: no logits_to_keep"
    assert str(report) == f"no prefix of these 20 prompt tokens was looked up: {report.declined}"
    right = torch.tensor([[1] * 20, [1] * 15 + [0] * 5])
    reports = forward(fresh(), house.model, [ids, ids], attention_mask=right, logits_to_keep=1)
    assert [report.query_tokens for report in reports] == [20, 15]
    assert {report.declined for report in reports} == {"padding that is not on the left"}
    (report,) = forward(fresh(), house.model, [ids], logits_to_keep=1, output_hidden_states=True)
    assert "hidden states" in report.declined
    house.model.train()
    (report,) = forward(fresh(), house.model, [ids], logits_to_keep=1)
    assert "training mode" in report.declined
    house.model.eval()


def test_a_later_batch_replaces_the_reason_of_the_one_before(house):
    ids = prompt("09:30", DOG)
    cache = house.ask(ids)
    cache.free()
    assert forward(cache, house.model, [ids])[0].reason == "declined"
    forward(cache, house.model, [ids[:1]])  # a decode step is no batch
    assert cache.explain_last()[0].query_tokens == len(ids)
    cache.free()
    assert forward(cache, house.model, [ids], logits_to_keep=1)[0].reason == "complete"
    assert copy.deepcopy(cache).explain_last() == cache.explain_last()


def test_a_cache_that_nobody_tells_its_tokens_says_so():
    model = tiny_models.make("llama")
    cache = hfpaged.PagedCache(config=model.config, num_blocks=40)
    (report,) = forward(cache, model, [prompt("09:30", DOG)])
    assert report.reason == "declined"
    assert "PagedCache(model), not of a config" in str(report)


def test_layers_with_a_state_of_their_own_are_the_reason():
    model = build("qwen3_next")  # linear attention between its other layers
    cache = hfpaged.PagedCache(model, num_blocks=40)
    (report,) = forward(cache, model, [list(range(3, 40))], logits_to_keep=1)
    assert "layers with a state of their own" in report.declined


@pytest.mark.demo_model
def test_the_demo_model_tells_of_the_time_in_its_system_prompt(demo):
    model, tokenizer = demo
    rules = "".join(f"Rule {number}: be polite, and answer in at most {number} sentences. " for number in range(2, 9))
    pool = None
    reports = []
    for clock, question in (("16:58:09", "When do you open?"), ("16:58:48", "May I bring my dog?")):
        chat = [
            {"role": "system", "content": f"You help the guests of a library.\nThe time is {clock}.\n{rules}"},
            {"role": "user", "content": question},
        ]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        cache = hfpaged.PagedCache(model, **({"pool": pool} if pool else {"num_blocks": 60}))
        pool = cache.pool
        if reports:
            asked = pool.explain(inputs["input_ids"], tokenizer)
        model.generate(**inputs, max_new_tokens=4, do_sample=False, **{compat.cache_argument(): cache})
        reports += cache.explain_last(tokenizer)
    hfpaged.unpatch(model)
    assert [report.reason for report in reports] == ["never seen", "differs"]
    assert reports[1] == asked
    difference = reports[1].difference
    ids = inputs["input_ids"][0].tolist()
    assert tokenizer.decode(ids[: difference.position]).endswith("The time is 16:58:")
    assert tokenizer.decode([difference.here_token, difference.known_token]) == "40"
    assert (difference.here_text, difference.known_text, difference.kind) == ("16:58:48", "16:58:09", "time")
    assert difference.here_context.startswith(" is 16:58:48.\n")
    assert difference.same_behind >= len(tokenizer.encode(rules)) - 2
    assert "'16:58:48' (here) vs '16:58:09' (known): a time; " in str(reports[1])
