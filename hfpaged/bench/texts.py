"""Prompts in words, from a few to a few hundred, cut out of a handful of paragraphs."""

from __future__ import annotations

from typing import Any

SHORTEST, LONGEST = 4, 240

OPENINGS = (
    "Go on with this text:",
    "Summarise:",
    "What comes next?",
    "Find the mistake in the following lines.",
    "Translate into French:",
    "Dear reader,",
    "Question:",
)

PARAGRAPHS = (
    "The harbour wakes before the town does. At four the first boats come in, low in the water, and men in yellow "
    "coats throw boxes of ice onto the quay. By six the market is loud, by nine it is over, and only the gulls stay "
    "to argue over what fell between the stones. Whoever arrives with the noon train finds a clean, empty square and "
    "thinks that nothing ever happens here.",
    "To bake a plain loaf, mix five hundred grams of flour with ten grams of salt, a little yeast and three hundred "
    "and fifty grams of water. Fold the dough four times in the first two hours, then leave it alone in a cool place "
    "until the next morning. Heat the oven as far as it goes, put a pot inside, and bake the bread in the closed pot "
    "for half an hour and in the open one for another fifteen minutes.",
    "A library keeps its books on shelves, and a catalogue says where each of them stands. When a reader asks for a "
    "long work in many volumes, the volumes need not stand side by side: it is enough that the catalogue lists their "
    "places in order. New volumes go wherever there is room. Two readers of the same volume share it, until one of "
    "them wants to write into the margins and is given a copy of his own.",
    "The function takes a list of numbers and returns the largest sum of neighbouring elements. It walks through the "
    "list once, keeping the best sum that ends at the current place. If that sum is negative, the next element "
    "starts afresh. def best(numbers): total = top = numbers[0]; for n in numbers[1:]: total = max(n, total + n); "
    "top = max(top, total); return top. Its running time grows with the length of the list and with nothing else.",
    "In the spring of that year the river left its bed. It took the mill, two bridges and the lower road, and when it "
    "went back in June it had chosen another valley. The maps were wrong for thirty years, because nobody paid for "
    "new ones, and strangers who trusted them stood in the meadows and looked for water. Children were told that the "
    "river had moved because the miller counted his money aloud.",
)


def texts(count: int) -> list[str]:
    """`count` prompts, all different, the short ones first."""
    return [_text(index, words) for index, words in enumerate(word_counts(count))]


def prose_ids(tokenizer: Any, name: str, index: int, length: int) -> list[int]:
    """`length` tokens of prose that begins with `name`, and then at another place for each `index`."""
    words = " ".join(PARAGRAPHS).split()
    start = 11 * index % len(words)
    prose = (words[start:] + words * (1 + length // len(words)))[: length + 1]
    ids: list[int] = tokenizer(f"{name} {' '.join(prose)}", add_special_tokens=False)["input_ids"]
    return ids[:length]


def word_counts(count: int) -> list[int]:
    """Rising numbers from SHORTEST to LONGEST. Each is about as many times the one before it, so that a batch of
    neighbours holds short and long rows, and only the last batch is as wide as the longest text."""
    ratio = LONGEST / SHORTEST
    return [round(SHORTEST * ratio ** (index / max(count - 1, 1))) for index in range(count)]


def _text(index: int, words: int) -> str:
    start = 11 * index
    pool = " ".join(PARAGRAPHS).split()
    body = (pool[start % len(pool) :] + pool * (words // len(pool) + 1))[: max(words - 2, 1)]
    return f"{OPENINGS[index % len(OPENINGS)]} {' '.join(body)}"
