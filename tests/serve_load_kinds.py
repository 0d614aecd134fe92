"""What the clients of the random load do, each kind by its name: a random number generator in, one `Attempt` out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from load_http import POLITE, Manner, Reply, request_bytes
from serve_load_worker import KEYS, LENGTH, MOST_BODY

MARK = "quartzite"  # in each text prompt, and nowhere in a log
WORDS = ("the", "quick", "brown", "fox", "jumps", "stop", "stops", "you", "see", "can't", "naïve", "café", "你好", "🙂")
GREEDY = [f"{MARK} {word} the quick {word}" for word in WORDS]
GREEDY_TOKENS = 12

# A queue that is full, and a request that took too long, may meet any that is not refused before.
BUSY = frozenset({429, 503})
OK = frozenset({200}) | BUSY


@dataclass(frozen=True)
class Attempt:
    """One request: what is sent and how, which answers are right, and what else is to be seen of a good one."""

    kind: str
    request: bytes
    allowed: frozenset[int | None] = OK
    manner: Manner = POLITE
    check: Callable[[Reply], None] = lambda reply: None
    greedy: int | None = None  # which of the prompts whose answers are known


def attempt(kind: str, rng: random.Random) -> Attempt:
    """One of this kind; the same for the same state of `rng`."""
    return replace(KINDS[kind](rng), kind=kind)


def words(rng: random.Random, most: int = 40) -> str:
    """A prompt with the mark in it. Many begin alike."""
    count = rng.choice((1, 3, 8, 20, most))
    begin = rng.choice(("", "the quick brown fox jumps over the lazy dog " * 3))
    return begin + f"{MARK} " + " ".join(rng.choices(WORDS, k=count))


def ids(rng: random.Random, most: int = 60) -> list[int]:
    return [rng.randrange(10, 300) for _ in range(rng.randint(1, most))]


def post(path: str, body: Any, rng: random.Random, **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    key = rng.choice(list(KEYS.values()))
    return request_bytes("POST", path, data, {"Authorization": f"Bearer {key}", **headers})


def get(path: str, rng: random.Random) -> bytes:
    return request_bytes("GET", path, None, {"Authorization": f"Bearer {rng.choice(list(KEYS.values()))}"})


def complete(rng: random.Random, **fields: Any) -> Attempt:
    """A completion, whole or streamed."""
    body = {"prompt": words(rng), "max_tokens": rng.choice((1, 4, 16, 40)), "stream": rng.random() < 0.4, **fields}
    return Attempt("", post("/v1/completions", body, rng), check=_ends if body["stream"] else _has_choices)


def _has_choices(reply: Reply) -> None:
    if reply.status == 200:
        assert reply.json["choices"], "an answer without choices"


def _ends(reply: Reply) -> None:
    if reply.status == 200:
        assert reply.body.endswith(b"data: [DONE]\n\n"), f"a stream that does not end: {reply.body[-200:]!r}"


def greedy(rng: random.Random) -> Attempt:
    number = rng.randrange(len(GREEDY))
    fields = {"prompt": GREEDY[number], "max_tokens": GREEDY_TOKENS, "temperature": 0, "ignore_eos": True}
    return replace(complete(rng, **fields), greedy=number)


def chat(rng: random.Random, **fields: Any) -> Attempt:
    messages = [{"role": "user", "content": words(rng)}]
    body = {"messages": messages, "max_tokens": rng.choice((1, 8, 24)), "stream": rng.random() < 0.5, **fields}
    check = _ends if body["stream"] else _has_choices
    return Attempt("", post("/v1/chat/completions", body, rng), check=check)


def responses(rng: random.Random) -> Attempt:
    body = {"input": words(rng), "max_output_tokens": rng.choice((16, 24)), "stream": rng.random() < 0.5}
    return Attempt("", post("/v1/responses", body, rng))


def bad_body(rng: random.Random) -> Attempt:
    """What is no JSON, or not the JSON that is wanted."""
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/responses"))
    more = {200} if path == "/tokenize" else set()  # where some of these fields mean nothing
    return Attempt("", post(path, rng.choice(BAD_BODIES), rng), BUSY | {400, 404, 413, 422} | more)


NUMBERS = (
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "-Infinity",
    "1" + 400 * "0",
    "-1",
    "1e-400",
    "9" * 5000,
    "true",
    '"7"',
)
FIELDS = (
    "max_tokens", "temperature", "top_p", "top_k", "n", "best_of", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_p", "logprobs", "top_logprobs", "min_tokens", "max_completion_tokens", "prompt", "stop",
    "stream", "logit_bias", "echo", "user", "model",
)  # fmt: skip


def odd_number(rng: random.Random) -> Attempt:
    """A known field with a number that is none, or none for it."""
    path, prompt = rng.choice((("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")))
    given = json.dumps(MARK if prompt == "prompt" else [{"role": "user", "content": MARK}])
    text = f'{{"{prompt}": {given}, "max_tokens": 2, "{rng.choice(FIELDS)}": {rng.choice(NUMBERS)}}}'
    return Attempt("", post(path, text.encode(), rng), OK | {400, 404, 422})


BAD_BODIES = (
    b"", b"{", b"null", b"[]", b"7", b'"text"', b"\xff\xfe{}", b"{'prompt': 1}", b'{"prompt": {}}', b"[" * 9000,
    b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", b'{"a":' * 4000 + b"1" + b"}" * 4000,
    b'{"prompt": [[1, "a"]]}', b'{"prompt": [1, 999999999]}', b'{"prompt": [-1]}', b'{"prompt": [1.5]}',
    b'{"prompt": "a", "max_tokens": "many"}', b'{"prompt": "a", "max_tokens": -3}', b'{"prompt": "a", "n": 0}',
    b'{"prompt": [], "messages": [], "input": []}', b'{"prompt": "a", "max_tokens": [1]}',
    b'{"messages": [{"role": 7}], "prompt": [null]}', b'{"messages": "hello", "prompt": true, "input": 1}',
    b'{"prompt": "a", "model": "no-such-model", "messages": [{"role": "user", "content": "a"}], "input": "a"}',
)  # fmt: skip


def surrogate(rng: random.Random) -> Attempt:
    """Text that JSON can write and UTF-8 cannot, in one field or another; and what only looks like it."""
    if rng.random() < 0.2:
        prompt = f"{MARK} C:\\ud800 and {json.dumps('🙂')}"
        return complete(rng, prompt=prompt)
    field, other = rng.choice(("model", "stop", "cache_salt", "user", "suffix")), rng.choice(("prompt", "nothing"))
    body = f'{{"prompt": "a", "max_tokens": 2, "{field}": "a \\ud83d", "{other}": "\\udc00 b"}}'
    return Attempt("", post("/v1/completions", body.encode(), rng), frozenset({400}))


def wrong_type(rng: random.Random) -> Attempt:
    kind = rng.choice(
        ("text/plain", "multipart/form-data; boundary=x", "application/xml", "application/json; charset=x")
    )
    body = {"prompt": words(rng), "max_tokens": 2}
    request = post("/v1/completions", body, rng, **{"Content-Type": kind})
    return Attempt("", request, OK | {400, 415, 422})


def chunked_lie(rng: random.Random) -> Attempt:
    """Chunks whose lengths are wrong, or no numbers, or that never end."""
    body = rng.choice(
        (b"zz\r\n{}\r\n0\r\n\r\n", b"5\r\n{}\r\n0\r\n\r\n", b"-1\r\n{}", b"ffffffffffffffff1\r\n{}", b"2\r\n{}")
    )
    headers = {"Authorization": "Bearer key-of-ann", "Transfer-Encoding": "chunked"}
    request = request_bytes("POST", "/v1/completions", body, headers, chunked=True)
    # 408 where the client is held up, so that it leaves later than it wants to.
    return Attempt("", request, frozenset({400, 408, 413, 422, None}), Manner(leave=1.0))


def length_lie(rng: random.Random) -> Attempt:
    """Content-Length says less, or no number; what comes behind it is no request."""
    length = rng.choice(("3", "-1", "abc", "0", "9" * 30))
    request = post("/v1/completions", {"prompt": "a", "max_tokens": 2}, rng, **{"Content-Length": length})
    return Attempt("", request, frozenset({400, 413, 422, None}), Manner(leave=1.0))


def chunked_big(rng: random.Random) -> Attempt:
    """More than is allowed, without a length that says so before."""
    piece = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    body = piece * (2 * MOST_BODY // 0x1000) + b"0\r\n\r\n"
    headers = {"Authorization": "Bearer key-of-bob", "Transfer-Encoding": "chunked"}
    request = request_bytes("POST", "/v1/completions", body, headers, chunked=True)
    return Attempt("", request, frozenset({413, 400, 422, None}))


def big_body(rng: random.Random) -> Attempt:
    return Attempt("", post("/v1/completions", {"prompt": "a" * (MOST_BODY + 1)}, rng), frozenset({413, None}))


def big_header(rng: random.Random) -> Attempt:
    request = post("/v1/completions", {"prompt": "a", "max_tokens": 1}, rng, **{"X-Much": "a" * 70_000})
    return Attempt("", request, frozenset({400, 413, 431, None}))


def long_prompt(rng: random.Random) -> Attempt:
    """More tokens than the model takes, prompt alone or with what it shall add."""
    fields = rng.choice(({"prompt": [7] * (LENGTH + 1)}, {"prompt": [7] * (LENGTH - 8), "max_tokens": 50}))
    return replace(complete(rng, **fields), allowed=BUSY | {400}, check=_says_numbers)


def _says_numbers(reply: Reply) -> None:
    if reply.status == 400:
        assert str(LENGTH) in reply.json["error"]["message"]


def key(rng: random.Random) -> Attempt:
    """None, a wrong one, another scheme."""
    given = rng.choice((None, "Bearer wrong", "Basic key-of-ann", "Bearer", "key-of-ann", "Bearer key-of-ann2", "\xff"))
    headers = {} if given is None else {"Authorization": given}
    body = json.dumps({"prompt": words(rng)}).encode()
    return Attempt("", request_bytes("POST", "/v1/completions", body, headers), frozenset({401}))


def lost(rng: random.Random) -> Attempt:
    """No such path, or not in this way."""
    path, method = rng.choice(
        (("/v1/nothing", "GET"), ("/v1/completions", "GET"), ("/health", "POST"), ("/%2e%2e", "GET"))
    )
    headers = {"Authorization": "Bearer key-of-eve"}
    return Attempt("", request_bytes(method, path, None, headers), frozenset({404, 405}))


def garbage(rng: random.Random) -> Attempt:
    """No HTTP."""
    request = rng.choice((b"\x16\x03\x01\x02\x00" * 20, b"GET\r\n\r\n", b"\r\n\r\n\r\n", rng.randbytes(300)))
    return Attempt("", request, frozenset({400, None}), Manner(leave=0.5))


def cut_body(rng: random.Random) -> Attempt:
    """Gone before the body has come."""
    whole = complete(rng)
    return replace(
        whole, allowed=frozenset({None}), manner=Manner(cut=rng.randrange(1, len(whole.request)), leave=0.05)
    )


def gone_soon(rng: random.Random) -> Attempt:
    """Gone while it waits, in prefill, or later; some before anything is done for it."""
    prompt = rng.choice(([7] * (LENGTH - 120), [ids(rng) for _ in range(4)], words(rng)))
    whole = complete(rng, prompt=prompt, max_tokens=100, ignore_eos=True)
    return replace(whole, allowed=OK | {None}, manner=Manner(leave=rng.choice((0.0, 0.001, 0.01, 0.1, 0.5))))


def gone_in_stream(rng: random.Random) -> Attempt:
    whole = complete(rng, stream=True, max_tokens=200, ignore_eos=True)
    return replace(whole, allowed=OK | {None}, manner=Manner(leave_at=rng.choice((1, 300, 2000, 10_000))))


def slow_reader(rng: random.Random) -> Attempt:
    """Takes little at a time of an answer that is long; some never take the rest."""
    whole = complete(rng, stream=True, max_tokens=200, ignore_eos=True, n=2, temperature=1, logprobs=5)
    manner = Manner(pause=rng.choice((0.01, 0.1, 3.0)), leave=8.0)
    return replace(whole, allowed=OK | {None}, manner=manner)


def tokens(rng: random.Random) -> Attempt:
    body: Any = {"prompt": words(rng)}
    return Attempt("", post("/tokenize", body, rng), frozenset({200}))


def detokenize(rng: random.Random) -> Attempt:
    return Attempt("", post("/detokenize", {"tokens": ids(rng)}, rng), frozenset({200}))


def explain(rng: random.Random) -> Attempt:
    return Attempt("", post("/v1/kv/explain", {"prompt": words(rng)}, rng), frozenset({200}))


def reset(rng: random.Random) -> Attempt:
    return Attempt("", post("/v1/kv/reset", b"", rng), frozenset({200, 409}))


def _getting(path: str, *statuses: int) -> Callable[[random.Random], Attempt]:
    return lambda rng: Attempt("", get(path, rng), frozenset(statuses or (200,)))


KINDS: dict[str, Callable[[random.Random], Attempt]] = {
    "text": complete,
    "ids": lambda rng: complete(rng, prompt=ids(rng)),
    "texts": lambda rng: complete(rng, prompt=[words(rng, 8) for _ in range(rng.randint(1, 4))]),
    "lists": lambda rng: complete(rng, prompt=[ids(rng, 30) for _ in range(rng.randint(1, 4))]),
    "sampled": lambda rng: complete(rng, temperature=0.8, top_p=0.9, seed=rng.randrange(99), presence_penalty=0.5),
    "n": lambda rng: complete(rng, n=rng.randint(2, 4), temperature=1.0),
    "best_of": lambda rng: complete(rng, best_of=3, n=2, temperature=1.0, stream=False),
    "logprobs": lambda rng: complete(rng, logprobs=rng.randint(0, 5)),
    "echo": lambda rng: complete(rng, echo=True, logprobs=1, max_tokens=1, stream=False),
    "stop": lambda rng: complete(rng, stop=[" the", "o"], max_tokens=40),
    "salted": lambda rng: complete(rng, cache_salt=rng.choice("ab")),
    "usage": lambda rng: complete(rng, stream=True, stream_options={"include_usage": True}),
    "greedy": greedy,
    "chat": chat,
    "chat_logprobs": lambda rng: chat(rng, logprobs=True, top_logprobs=3),
    "chat_json": lambda rng: chat(rng, response_format={"type": "json_object"}),
    "responses": responses,
    "tokenize": tokens,
    "detokenize": detokenize,
    "explain": explain,
    "reset": reset,
    "stats": _getting("/v1/kv/stats"),
    "models": _getting("/v1/models"),
    "metrics": _getting("/metrics"),
    "health": _getting("/health"),
    "ready": _getting("/ready", 200, 503),
    "page": _getting("/"),
    "openapi": _getting("/openapi.json"),
    "bad_body": bad_body,
    "odd_number": odd_number,
    "surrogate": surrogate,
    "wrong_type": wrong_type,
    "chunked_lie": chunked_lie,
    "length_lie": length_lie,
    "chunked_big": chunked_big,
    "big_body": big_body,
    "big_header": big_header,
    "long_prompt": long_prompt,
    "key": key,
    "lost": lost,
    "garbage": garbage,
    "cut_body": cut_body,
    "gone_soon": gone_soon,
    "gone_in_stream": gone_in_stream,
    "slow_reader": slow_reader,
}
PATHS = {
    "chat": "/v1/chat/completions", "chat_logprobs": "/v1/chat/completions", "chat_json": "/v1/chat/completions",
    "responses": "/v1/responses", "tokenize": "/tokenize", "detokenize": "/detokenize", "explain": "/v1/kv/explain",
    "reset": "/v1/kv/reset", "stats": "/v1/kv/stats", "metrics": "/metrics", "ready": "/ready",
}  # fmt: skip
# How often, beside the others: what costs the server little comes often, what keeps a client waiting seldom.
WEIGHTS = {"greedy": 4, "gone_soon": 4, "gone_in_stream": 3, "cut_body": 2, "text": 3, "chat": 3, "slow_reader": 0.3}
