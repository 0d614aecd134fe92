"""A router's side of KV events: which prefixes does this engine hold? pip install 'hfpaged[events]'"""

import msgspec
import zmq

import hfpaged
from hfpaged import demo_model

model, tokenizer = demo_model.load()
batcher = hfpaged.ContinuousBatcher(model, tokenizer, memory="64MiB")
prompts = [f"You are a helpful assistant. {question}" for question in ("Why is the sky blue?", "What is a fjord?")]

# Publishes on 127.0.0.1 alone: events hold the token ids of prompts and answers in clear.
with hfpaged.kv_events.publish(batcher, "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*") as publisher:
    batcher.generate(prompts, max_new_tokens=24, do_sample=False)

    # Whoever comes late, or has missed some, asks for the batches since one; others subscribe to `publisher.endpoint`.
    with zmq.Context() as context, context.socket(zmq.DEALER) as replays:
        replays.connect(publisher.replay_endpoint)
        known = {}
        while len(known) < batcher.pool.stats().blocks_cached:  # events come some milliseconds behind the blocks
            replays.send_multipart([b"", (0).to_bytes(8, "big")])
            while payload := replays.recv_multipart()[-1]:  # [b"", topic, number, payload], and an empty one at the end
                for event in msgspec.msgpack.decode(payload)[1]:
                    if event["type"] == "BlockStored":
                        known.update(dict.fromkeys(event["block_hashes"], event["parent_block_hash"]))
                    elif event["type"] == "BlockRemoved":
                        for name in event["block_hashes"]:
                            known.pop(name, None)
                    else:  # AllBlocksCleared
                        known.clear()

print(f"the router knows {len(known)} blocks of {batcher.pool.block_size} tokens, {publisher.counts}")
batcher.close()
