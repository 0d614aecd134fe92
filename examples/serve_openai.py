"""A server and OpenAI's own client: a chat, a stream, and a second turn that finds the first one in the cache."""

import re
import subprocess
import sys

import httpx
from openai import OpenAI

KEY = "key-of-ann"
command = [sys.executable, "-m", "hfpaged.serve", "--port", "0", "--api-key", KEY, "--kv-cache-memory", "256MiB"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    url = next(found[1] for line in server.stdout if (found := re.match(r"ready: (\S+)/v1 ", line)))
    client = OpenAI(base_url=url + "/v1", api_key=KEY)
    model = client.models.list().data[0].id
    settings = {"model": model, "max_tokens": 24, "temperature": 0}

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(messages=messages, **settings)
    print(answer.choices[0].message.content, "-", answer.usage.prompt_tokens, "tokens read")

    messages += [answer.choices[0].message, {"role": "user", "content": "And of Italy?"}]
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **settings
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        else:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(" -", chunk.usage.prompt_tokens, "tokens read,", cached, "of them known")

    stats = httpx.get(url + "/v1/kv/stats", headers={"Authorization": f"Bearer {KEY}"}).json()
    blocks = stats["pool"]["blocks"]
    print(f"{blocks['total']} blocks: {blocks['used']} in use, {blocks['cached']} cached, {blocks['free']} free")
finally:
    server.terminate()
    server.wait()
