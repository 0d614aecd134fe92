"""A chat with tools: the model is made to call two functions, and answers with what they return."""

import json
import re
import subprocess
import sys

import httpx
from openai import OpenAI


def get_weather(city: str) -> str:
    return f"18 degrees and rain in {city}"


def add(a: int, b: int) -> str:
    return str(a + b)


def told(function, description, **parameters):
    """A function as the API describes it."""
    schema = {
        "type": "object", "required": list(parameters), "additionalProperties": False,
        "properties": {name: {"type": kind} for name, kind in parameters.items()},
    }  # fmt: skip
    about = {"name": function.__name__, "description": description, "parameters": schema}
    return {"type": "function", "function": about}


FUNCTIONS = {"get_weather": get_weather, "add": add}
TOOLS = [told(get_weather, "The weather in a city", city="string"), told(add, "A sum", a="integer", b="integer")]

command = [sys.executable, "-m", "hfpaged.serve", "--port", "0", "--kv-cache-memory", "256MiB"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    url = next(found[1] for line in server.stdout if (found := re.match(r"ready: (\S+)/v1 ", line)))
    client = OpenAI(base_url=url + "/v1", api_key="none")
    model = client.models.list().data[0].id
    settings = {"model": model, "tools": TOOLS, "max_tokens": 48, "temperature": 0}
    for question, name in (("How is the weather in Rome?", "get_weather"), ("What is 17 plus 4?", "add")):
        messages = [{"role": "user", "content": question}]
        forced = {"type": "function", "function": {"name": name}}  # so small a model would not think of it
        message = client.chat.completions.create(messages=messages, tool_choice=forced, **settings).choices[0].message
        call = message.tool_calls[0]
        result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        print(f"{question}\n  {call.function.name}({call.function.arguments}) = {result}")
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        answer = client.chat.completions.create(messages=messages, tool_choice="none", **settings)
        print(f"  {answer.choices[0].message.content}\n")
    print(httpx.get(url + "/v1/kv/stats").json()["pool"]["blocks"]["cached"], "blocks are kept for the next turn")
finally:
    server.terminate()
    server.wait()
