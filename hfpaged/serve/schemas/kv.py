"""/v1/kv/*: what an operator asks of the pool, and is told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from hfpaged.serve.schemas.chat import Message, TemplateBody

_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class ExplainRequest(TemplateBody):
    """One prompt, as a request would have it: either `prompt` or `messages`."""

    model: str | None = Field(None, description="A name that /v1/models tells; an adapter has prefixes of its own.")
    prompt: str | _Ids | None = Field(None, description="A text, or token ids.")
    messages: list[Message] | None = Field(None, min_length=1, fail_fast=True, description="Instead, a conversation.")
    cache_salt: str | None = Field(None, description="As in the request that is asked about.")


class Difference(BaseModel):
    """The first token in which a prompt differs from the known one of the same caller that is most like it."""

    position: int
    here_token: int
    known_token: int
    same_behind: int = Field(description="Tokens behind it that are the same in both.")
    num_runs: int
    saved_tokens: int = Field(description="Tokens that would be found if what differs stood behind what is the same.")
    here_text: str | None
    known_text: str | None
    here_context: str | None
    known_context: str | None
    kind: str | None = Field(description="A guess: date, time, uuid, number, user name, input.")


class Explanation(BaseModel):
    """Why a prompt would hit or miss now."""

    object: Literal["kv.explanation"]
    prompt_tokens: int
    known_tokens: int
    block_size: int
    reason: str
    explanation: str
    evicted_at: float | None = Field(description="Seconds since 1970.")
    lost_tokens: int
    difference: Difference | None


class ResetDone(BaseModel):
    """All prefixes are forgotten."""

    object: Literal["kv.reset"]
    dropped_blocks: int


class Blocks(BaseModel):
    """used + cached + free + reserved = total. `free` ones keep no prefix; `shared` ones are used by two or more."""

    total: int
    used: int
    shared: int
    cached: int
    free: int
    reserved: int


class Bytes(BaseModel):
    """`capacity` of all blocks, `reserved` by tensors, `live` filled by tokens, `wasted` in blocks in use."""

    capacity: int
    reserved: int
    live: int
    wasted: int


class Pool(BaseModel):
    kv_format: str
    block_size: int
    block_bytes: int
    blocks: Blocks
    bytes: Bytes
    usage_ratio: float
    tokens: int
    unfilled_slots: int
    evicted_blocks_total: int


class BlockMap(BaseModel):
    """The blocks by id, up to `blocks_shown`; `is_cut` where the pool has more."""

    blocks_total: int
    blocks_shown: int
    is_cut: bool
    states: list[list[int]] = Field(
        description="Runs [state, blocks]: 0 free, -1 cached (evictable), else how many block tables hold each."
    )
    holders: list[list[list[int]]] = Field(description="Of each holder the runs [first block, blocks].")
    names: list[str | None] = Field(description="Of each holder; null for a request of another API key.")


class RequestBytes(BaseModel):
    own: int
    shared: int


class RequestRow(BaseModel):
    """One request. Of another API key only its state and its memory are told."""

    id: str | None
    tenant: str | None
    is_hidden: bool
    state: Literal["running", "waiting", "preempted"]
    prompt_tokens: int | None
    generated_tokens: int | None
    cached_tokens: int | None
    blocks: int
    kv_bytes: RequestBytes
    age_seconds: float | None


class Requests(BaseModel):
    running: int
    waiting: int
    preempted: int
    list: list[RequestRow]
    not_listed: int


class Miss(BaseModel):
    """A prompt that was not all known when it was admitted."""

    time: float
    request_id: str
    tenant: str
    hit_tokens: int
    queried_tokens: int
    reason: str
    explanation: str


class RecentPrefixes(BaseModel):
    window_seconds: float
    queried_tokens: int
    hit_tokens: int
    hit_rate: float | None


class Prefixes(BaseModel):
    queried_tokens_total: int
    hit_tokens_total: int
    hit_rate: float | None
    lookups_total: dict[str, int]
    recent: RecentPrefixes
    misses: list[Miss]


class Throughput(BaseModel):
    window_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


class Percentiles(BaseModel):
    """Seconds; null while there is none in the window. The totals are since the start."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None
    count_total: int
    sum_total: float


class Latency(BaseModel):
    window_seconds: float
    time_to_first_token: Percentiles
    inter_token: Percentiles


class Totals(BaseModel):
    """Counters since the start, as in /metrics."""

    requests_received: int
    requests_finished: dict[str, int]
    requests_aborted: int
    requests_rejected: dict[str, int]
    preemptions: int
    prompt_tokens: int
    computed_tokens: dict[str, int]
    generated_tokens: int


class Finding(BaseModel):
    severity: Literal["problem", "advice", "note"]
    title: str
    evidence: str
    remedy: str
    rule: str


class Doctor(BaseModel):
    verdict: str
    is_sure: bool
    findings: list[Finding]
    notes: list[Finding]
    age_seconds: float


class SecondOfHistory(BaseModel):
    """What happened in one second, and how blocks stood at its end."""

    time: int
    used: int
    cached: int
    reserved: int
    free: int
    running: int
    waiting: int
    prefill_tokens: int
    decode_tokens: int
    queried_tokens: int
    hit_tokens: int


class Stats(BaseModel):
    """All that the live page shows."""

    object: Literal["kv.stats"]
    time: float
    uptime_seconds: float
    models: list[str]
    accepts: Literal["messages", "text", "token ids"] = Field(description="What prompts can be made of at best.")
    limits: dict[str, int]
    pool: Pool
    memory_map: BlockMap
    requests: Requests
    prefixes: Prefixes
    throughput: Throughput
    latency: Latency
    totals: Totals
    doctor: Doctor
    history: list[SecondOfHistory]
