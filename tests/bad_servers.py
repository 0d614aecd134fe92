"""Servers for tests of `--against` that are none, or bad ones, and answers of theirs."""

from __future__ import annotations

import copy
import http.server
import json
import threading
from contextlib import contextmanager

import tiny_models
import tiny_tokenizers

MODELS = {"data": [{"id": "first"}, {"id": "second"}]}


def tiny_with_chat():
    """A model and its tokenizer, which has a chat template."""
    tokenizer = copy.deepcopy(tiny_tokenizers.byte_level())  # others know no template
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tiny_models.make("llama", vocab_size=len(tokenizer)).eval(), tokenizer


@contextmanager
def answering(answer):
    """A server whose handler is `answer`; a plain one that speaks no OpenAI unless `answer` does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        def do_POST(self):
            self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer(self)

        def log_message(self, *args):
            pass

        def say(self, status, data, **headers):
            data = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            for name, value in {"Content-Length": len(data), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(data)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def status(code):
    return lambda handler: handler.say(code, {"error": "no"})


def garbage(handler):
    handler.say(200, b"<html>\xff it works")


def nothing(handler):
    handler.close_connection = True


def no_models(handler):
    handler.say(200, {"data": []})


def redirect(handler):
    handler.say(302, b"", Location="http://127.0.0.1:9/")


def no_http(handler):
    handler.wfile.write(b"SSH-2.0\r\n")
    handler.close_connection = True


def stream(text, tokens=None):
    events = [{"choices": [{"text": part}]} for part in text]
    events += [] if tokens is None else [{"choices": [], "usage": {"completion_tokens": tokens}}]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
