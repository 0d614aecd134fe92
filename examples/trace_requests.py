"""Where the time went: the spans of a few requests, printed as a tree instead of being sent to Jaeger."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import hfpaged
from hfpaged import demo_model, telemetry

spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
telemetry.instrument(provider)

model, tokenizer = demo_model.load()
rules = "You are a careful assistant. Answer in one short sentence, and say so when you do not know. " * 4
questions = ["Why is the sky blue?", "What is a prime number?", "Who wrote Faust?", "How deep is the sea?"]

prompts = [f"{rules}\nQ: {question}\nA:" for question in questions]
batcher = hfpaged.ContinuousBatcher(model, tokenizer, num_blocks=12)  # so few that somebody is preempted

with batcher, provider.get_tracer("example").start_as_current_span("four questions"), telemetry.operation("chat"):
    batcher.generate(prompts, max_new_tokens=32, do_sample=False)
telemetry.uninstrument()


def show(parent, depth=0):
    """The spans below one, each with its beginning and end in milliseconds."""
    found = [span for span in spans.get_finished_spans() if (span.parent and span.parent.span_id) == parent]
    for span in sorted(found, key=lambda span: span.start_time):
        begin, end = ((time - origin) / 1e6 for time in (span.start_time, span.end_time))
        about = {name.removeprefix("hfpaged."): value for name, value in span.attributes.items() if name in SHOWN}
        print(f"{begin:7.0f} - {end:5.0f} ms  {'  ' * depth}{span.name}  {about or ''}")
        show(span.context.span_id, depth + 1)


SHOWN = {"hfpaged.tokens", "hfpaged.wait.blocks", "hfpaged.kv.blocks_peak", "hfpaged.prefix.hit_tokens"}
origin = min(span.start_time for span in spans.get_finished_spans())
show(None)
