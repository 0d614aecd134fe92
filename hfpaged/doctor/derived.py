"""What follows from the metrics: shares, means and rates. All of these raise Lacks where a metric is not there."""

from __future__ import annotations

from hfpaged.doctor.reading import Lacks, Reading

# Fewer ended requests say nothing about rates.
ENOUGH_REQUESTS = 10
# Blocks in use, as a part of the pool: below it memory lies idle, above it the next burst waits or preempts.
GOOD_USE = (0.7, 0.9)
TARGET_USE = 0.8
# A cause of waiting that takes less than this part of the time of requests is no bottleneck.
NOTICED_WAIT = 0.2
LARGEST_BLOCK = 1024


def ended(reading: Reading) -> float:
    """Requests that came to an end, aborted ones too."""
    return reading.histogram("hfpaged_request_duration_seconds").count


def calls(reading: Reading) -> float:
    """Calls of generate() that came to an end; 0 where nobody counts them."""
    return reading.get("hfpaged_generate_calls_total") or 0.0


def has_enough(reading: Reading) -> bool:
    """Whether enough requests have ended to speak of rates."""
    return ended(reading) >= ENOUGH_REQUESTS


def busy_seconds(reading: Reading) -> float:
    """Seconds in which the engine made steps."""
    return reading.histogram("hfpaged_step_duration_seconds").sum


def num_steps(reading: Reading) -> float:
    return reading.histogram("hfpaged_step_duration_seconds").count


def has_worked(reading: Reading) -> bool:
    """Whether a step or a call of generate() has come to its end."""
    return calls(reading) > 0 or ("hfpaged_step_duration_seconds" in reading.known and num_steps(reading) > 0)


def tokens_per_second(reading: Reading) -> float:
    """Sampled tokens per second of work, so that a night without requests does not count."""
    return _ratio(reading.total("hfpaged_generated_tokens_total"), busy_seconds(reading))


def blocks(reading: Reading, *states: str) -> float:
    """Blocks in these states, all of them without any."""
    by_state = reading.by("hfpaged_kv_blocks", "state")
    return sum(count for state, count in by_state.items() if state in states or not states)


def capacity(reading: Reading) -> float:
    """Bytes of all blocks of the pool."""
    return reading.total("hfpaged_kv_bytes", kind="capacity")


def use_now(reading: Reading) -> float:
    """Blocks that sequences hold, and what takes the memory of others (reserved), as a part of all."""
    return _ratio(blocks(reading, "used", "reserved"), blocks(reading))


def use(reading: Reading) -> float:
    """How full the pool is while there is work. Since the process began: what ended requests held, integrated over
    time, against what could have been held. Between two readings that would count what requests held before, so there
    it is what they hold now.
    """
    held = 0.0 if reading.seconds is not None else reading.total("hfpaged_kv_byte_seconds_total")
    return min(_ratio(held, capacity(reading) * working_seconds(reading)), 1.0) if held else use_now(reading)


def seconds_in_batch(reading: Reading) -> float:
    """Of all ended requests: their time without what they waited."""
    return max(reading.histogram("hfpaged_request_duration_seconds").sum - sum(waits(reading).values()), 0.0)


def working_seconds(reading: Reading) -> float:
    """Seconds in which there was work: those of steps and between them. The time of all requests in the batch, by how
    many there were in it.
    """
    at_once = mean_running(reading) / sequences_per_request(reading)
    return max(_ratio(seconds_in_batch(reading), at_once), busy_seconds(reading))


def sequences_per_request(reading: Reading) -> float:
    """1 and more: samples and beams of one prompt."""
    return max(_ratio(reading.histogram("hfpaged_sequence_tokens").count, ended(reading)), 1.0)


def bytes_per_request(reading: Reading) -> float:
    """Mean memory of a request while it was in the batch; 0 where none has ended."""
    return _ratio(reading.total("hfpaged_kv_byte_seconds_total"), seconds_in_batch(reading))


def sequences_that_fit(reading: Reading) -> float:
    """How many sequences of the mean size that was seen fill the pool to TARGET_USE; 0 where none was seen."""
    requests = _ratio(TARGET_USE * capacity(reading), bytes_per_request(reading))
    return requests * sequences_per_request(reading)


def mean_running(reading: Reading) -> float:
    """Sequences in a step, on average."""
    return reading.histogram("hfpaged_step_sequences").mean


def waits(reading: Reading) -> dict[str, float]:
    """Seconds that requests waited, by cause."""
    return reading.by("hfpaged_wait_seconds_total", "cause")


def wait_share(reading: Reading, cause: str | None = None) -> float:
    """Waiting for this cause (any, without one) as a part of the time of all ended requests."""
    found = waits(reading)
    total = max(reading.histogram("hfpaged_request_duration_seconds").sum, sum(found.values()))
    return _ratio(sum(found.values()) if cause is None else found.get(cause, 0.0), total)


def main_wait(reading: Reading) -> str | None:
    """The cause that requests waited for longest, None where they waited for none."""
    found = waits(reading)
    cause = max(found, key=lambda each: found[each], default=None)
    return cause if cause is not None and found[cause] > 0 else None


def is_held_up_by(reading: Reading, cause: str) -> bool:
    """Whether requests wait for this more than for anything else, and noticeably."""
    return has_enough(reading) and main_wait(reading) == cause and wait_share(reading, cause) >= NOTICED_WAIT


def mean_waiting(reading: Reading, cause: str) -> float:
    """How many requests waited for this on average while there was work: Little's law."""
    return _ratio(waits(reading).get(cause, 0.0), working_seconds(reading))


def preemptions_per_request(reading: Reading) -> float:
    return _ratio(reading.total("hfpaged_preemptions_total"), ended(reading))


def hit_rate(reading: Reading) -> float:
    """Found prompt tokens as a part of those that were looked up."""
    queried = reading.total("hfpaged_prefix_queried_tokens_total")
    return _ratio(reading.total("hfpaged_prefix_hit_tokens_total"), queried)


def prefill_share(reading: Reading) -> float:
    """Prompt tokens as a part of all that went through the model, in batchers and in generate()."""
    prompt = decoded = 0.0
    if calls(reading):
        tokens = reading.by("hfpaged_generate_tokens_total", "kind")
        prompt, decoded = tokens.get("prompt", 0.0) - tokens.get("cached", 0.0), tokens.get("output", 0.0)
    if not calls(reading) or reading.get("hfpaged_computed_tokens_total"):
        computed = reading.by("hfpaged_computed_tokens_total", "phase")
        prompt, decoded = prompt + computed.get("prefill", 0.0), decoded + computed.get("decode", 0.0)
    return _ratio(prompt, prompt + decoded)


def block_size(reading: Reading) -> int:
    """Tokens in a block. Raises Lacks, also for what is no size."""
    found = reading.label("hfpaged_kv_pool_info", "block_size")
    if not found.isdecimal() or not 0 < int(found) <= LARGEST_BLOCK:
        raise Lacks("a block_size that is one in hfpaged_kv_pool_info")
    return int(found)


def limit(reading: Reading, name: str) -> int:
    """max_num_seqs of all engines together, max_num_batched_tokens or max_model_len of the one with most."""
    largest = reading.largest("hfpaged_engine_limit", limit=name)
    return int(reading.total("hfpaged_engine_limit", limit=name) if name == "max_num_seqs" else largest)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
