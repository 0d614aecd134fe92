"""The live page in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
import time
import zipfile
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_models
import tiny_tokenizers
from replicas_here import served_ingress
from served import served, wait_until

from hfpaged import ContinuousBatcher
from hfpaged.doctor.exposition import parse
from hfpaged.engine.events import StepFinished
from hfpaged.serve import ServeOptions
from hfpaged.serve.routes.page import load_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAME = "page-test"
TEXT = "the quick brown fox jumps over the lazy dog"
TEMPLATE = (
    "{% for m in messages %}<|name|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|name|>{% endif %}"
)
EVIL = "<img src=x onerror=\"document.title='evil'\"><script>document.title='evil'</script>"
PATIENCE = 20_000  # milliseconds

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None,
    reason="needs a browser: apt install chromium, and pip install playwright (its own browsers are not needed)",
)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def chromium():
    with import_module("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visitor:
    """One page of a browser of its own, and what it did: requests, and what the console said."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        self.context.set_default_timeout(PATIENCE)
        self.context.add_init_script(
            "window.isAway = false;Object.defineProperty(document, 'hidden', {get: () => window.isAway});"
        )
        self.page = self.context.new_page()
        self.urls, self.complaints = [], []
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.on("console", lambda message: self._heard(message.type, message.text))
        self.page.on("pageerror", lambda error: self._heard("error", str(error)))

    def _heard(self, kind, text):
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def go(self, server):
        self.page.goto(f"{server.url}/")
        return self

    def is_live(self):
        self.page.wait_for_selector("#status[data-state=live]")
        return self

    def text(self, selector):
        return self.page.text_content(selector)

    def wait_for(self, expression):
        """Until it is true. The page's policy forbids what playwright's own wait_for_function would run there."""
        wait_until(lambda: self.page.evaluate(expression) or self.page.wait_for_timeout(30))

    def polls(self):
        return sum("/v1/kv/stats" in url for url in self.urls)

    def ask(self, text, max_tokens=100):
        self.page.fill("#prompt", text)
        self.page.fill("#max-tokens", str(max_tokens))
        self.page.fill("#temperature", "0")
        self.page.click("#send")

    def look_away(self, is_away):
        self.page.evaluate("is => { isAway = is; document.dispatchEvent(new Event('visibilitychange')) }", is_away)


@pytest.fixture
def visit(chromium):
    visitors = []

    def visit(server, **options):
        visitors.append(Visitor(chromium, **options).go(server))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.context.close()


@pytest.fixture(scope="module")
def model():
    """It has a name of its own: /metrics are those of a process, and other tests have run in it."""
    model = tiny_models.make("llama", vocab_size=420, max_position_embeddings=4096)
    model.config._name_or_path = NAME
    return model


@pytest.fixture(scope="module")
def tokenizer():
    found = copy.deepcopy(tiny_tokenizers.byte_level())
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def batcher(model, tokenizer):
    with ContinuousBatcher(model, tokenizer, num_blocks=256, block_size=16) as batcher:
        yield batcher


@pytest.fixture
def server(batcher):
    with served(batcher) as server:
        yield server


@pytest.fixture
def slowly(batcher):
    """Steps that somebody could watch."""

    def wait(event):
        if isinstance(event, StepFinished):
            time.sleep(0.02)

    batcher.hooks.append(wait)
    yield
    batcher.hooks.remove(wait)


@needs_browser
def test_it_loads_from_its_server_alone_and_nothing_complains(server, visit):
    visitor = visit(server).is_live()
    visitor.ask(TEXT, max_tokens=4)
    visitor.page.wait_for_selector(".answer[aria-busy=false]")
    assert all(url.startswith((f"{server.url}/", "data:")) for url in visitor.urls), visitor.urls
    assert visitor.complaints == []


@needs_browser
def test_its_numbers_are_those_of_the_metrics(server, visit):
    for text in (TEXT, TEXT, TEXT + " " + TEXT):
        server.client.post("/v1/completions", json={"prompt": text, "max_tokens": 20, "temperature": 0})
    assert server.client.post("/v1/completions", json={"prompt": [3] * 5000}).status_code == 400
    server.wait_until_idle()
    metrics = parse(server.client.get("/metrics").text)

    def metric(name, **labels):
        labels["model_name"] = NAME
        return sum(each.value for each in metrics.samples[name] if labels.items() <= each.labels.items())

    wanted = {
        **{state: metric("hfpaged_kv_blocks", state=state) for state in ("used", "cached", "free")},
        "total": 256,
        "running": metric("hfpaged_requests_running"),
        "waiting": metric("hfpaged_requests_waiting"),
        "total-received": metric("hfpaged_requests_received_total"),
        "total-finished": metric("hfpaged_requests_finished_total"),
        "total-aborted": metric("hfpaged_requests_aborted_total"),
        "total-rejected": metric("hfpaged_requests_rejected_total"),
        "total-prompt-tokens": metric("hfpaged_prompt_tokens_total"),
        "total-hit-tokens": metric("hfpaged_prefix_hit_tokens_total"),
        "total-generated-tokens": metric("hfpaged_generated_tokens_total"),
        "total-preemptions": metric("hfpaged_preemptions_total"),
        "total-evicted": metric("hfpaged_kv_evicted_blocks_total"),
    }
    visitor = visit(server).is_live()
    shown = {name: float(visitor.text(f"#{name}").replace(",", "")) for name in wanted}
    assert shown == wanted
    assert min(shown[name] for name in ("cached", "total-hit-tokens", "total-rejected")) > 0
    hits, queries = metric("hfpaged_prefix_hit_tokens_total"), metric("hfpaged_prefix_queried_tokens_total")
    assert visitor.text("#hit-rate-sub") == f"{100 * hits / queries:.0f} % since the start"


@needs_browser
def test_requests_that_run_are_listed_and_their_blocks_can_be_pointed_at(server, visit, slowly):
    visitor = visit(server).is_live()
    visitor.ask(TEXT, max_tokens=2000)
    visitor.wait_for("document.querySelector('#requests .state.running')")
    name = visitor.page.get_attribute("#requests .row:not(.head) .id", "title")
    assert server.batcher.requests_with_blocks() == {name}
    block = server.batcher.memory_map().sequences[0].all_blocks[0]
    place = visitor.page.evaluate(
        "b => ({x: (b % cells.columns + .5) * cells.size, y: (Math.floor(b / cells.columns) + .5) * cells.size})", block
    )
    visitor.page.hover("#map", position=place)
    visitor.wait_for(
        f"document.querySelector('#map-note').textContent === `Block {block}: held by ${{short('{name}')}}`"
    )
    visitor.page.focus("#map")
    visitor.page.keyboard.press("ArrowRight")
    visitor.wait_for(f"document.querySelector('#map-note').textContent.startsWith('Block {block + 1}: ')")
    visitor.page.click("#stop")
    visitor.wait_for("document.querySelector('#requests .empty')")


@needs_browser
def test_the_chat_box_streams_and_tells_what_it_cost(server, visit, slowly):
    visitor = visit(server).is_live()
    visitor.page.evaluate(
        "() => { window.lengths = new Set();"
        " new MutationObserver(() => lengths.add(document.querySelector('.answer .said')?.textContent.length))"
        ".observe(document.querySelector('#log'), {childList: true, subtree: true, characterData: true}) }"
    )
    visitor.ask(TEXT, max_tokens=40)
    visitor.page.wait_for_selector(".answer[aria-busy=false]")
    assert visitor.page.evaluate("lengths.size") > 5
    (answer,) = server.client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": TEXT}], "max_tokens": 40, "temperature": 0},
    ).json()["choices"]
    assert visitor.text(".answer .said") == answer["message"]["content"]
    first, speed, *rest, ending = visitor.text(".answer .meta").split(" · ")
    assert re.fullmatch(r"first token after [\d.]+ m?s", first)
    assert re.fullmatch(r"[\d.,]+ tokens/s", speed)
    assert rest[0] == "40 tokens"
    assert re.fullmatch(r"\d+ of \d+ prompt tokens cached", rest[1])
    assert ending == "cut at max tokens"


@needs_browser
def test_a_conversation_goes_on_and_says_whether_it_is_known(server, visit):
    visitor = visit(server).is_live()
    visitor.ask(TEXT, max_tokens=20)
    visitor.page.wait_for_selector(".answer[aria-busy=false]")
    visitor.page.click("#why")
    visitor.wait_for("document.querySelector('#explained').textContent.includes('prompt tokens are known')")
    visitor.ask("and then?", max_tokens=20)
    visitor.wait_for("document.querySelectorAll('.answer[aria-busy=false]').length === 2")
    found = int(re.search(r"(\d+) of \d+ prompt tokens cached", visitor.text(".answer:last-child .meta"))[1])
    assert found > 0
    visitor.page.click("#clear")
    assert visitor.text("#log") == ""


@needs_browser
def test_stop_aborts_the_request(server, visit, slowly):
    visitor = visit(server).is_live()
    visitor.ask(TEXT, max_tokens=3000)
    visitor.wait_for("document.querySelector('.answer .said')?.textContent")
    assert server.batcher.loop.requests
    visitor.page.click("#stop")
    visitor.page.wait_for_selector(".answer[aria-busy=false]")
    wait_until(lambda: not server.batcher.loop.requests)
    assert visitor.text(".answer .meta").endswith("stopped")
    assert visitor.complaints == []


@needs_browser
def test_a_model_without_a_chat_template_goes_on_with_the_text(model, visit):
    with ContinuousBatcher(model, tiny_tokenizers.byte_level(), num_blocks=64) as batcher, served(batcher) as server:
        visitor = visit(server).is_live()
        visitor.ask(TEXT, max_tokens=6)
        visitor.page.wait_for_selector(".answer[aria-busy=false]")
        body = {"prompt": TEXT, "max_tokens": 6, "temperature": 0}
        text = server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert visitor.text(".answer .said") == text
        assert "no chat template" in visitor.text("#chat-note")
        assert visitor.complaints == []
        visitor.context.close()


@needs_browser
def test_a_server_with_keys_asks_for_one(batcher, visit):
    with served(batcher, ServeOptions(api_keys={"ann": "open sesame"})) as server:
        visitor = visit(server)
        visitor.page.wait_for_selector("#locked:not([hidden])")
        polls = visitor.polls()
        assert "in this tab only" in visitor.text("#locked-why")
        visitor.page.fill("#key", "wrong")
        visitor.page.keyboard.press("Enter")
        visitor.wait_for("document.querySelector('#locked-why').textContent.includes('not known')")
        assert visitor.polls() == polls + 1  # it does not go on asking
        visitor.page.fill("#key", "open sesame")
        visitor.page.keyboard.press("Enter")
        visitor.is_live()
        assert visitor.page.is_hidden("#locked")
        visitor.ask(TEXT, max_tokens=4)
        visitor.page.wait_for_selector(".answer[aria-busy=false]")
        assert visitor.text(".answer .said")
        visitor.page.reload()
        visitor.is_live()
        visitor.context.close()


@needs_browser
def test_of_replicas_all_are_listed_and_the_chosen_one_is_shown(model, tokenizer, chromium):
    with (
        ContinuousBatcher(model, tokenizer, num_blocks=64) as one,
        ContinuousBatcher(model, tokenizer, num_blocks=96) as two,
        served_ingress([one, two]) as (url, calls),
    ):
        visitor = Visitor(chromium)
        visitor.page.goto(f"{url}/")
        visitor.is_live()
        visitor.wait_for("document.querySelectorAll('#replicas button').length === 2")
        assert visitor.text("#replicas [aria-pressed=true] .id") == "r0"
        assert visitor.text("#total") == "64"
        visitor.ask(TEXT, max_tokens=20)
        visitor.page.wait_for_selector(".answer[aria-busy=false]")
        visitor.page.click("#replicas li:nth-child(2) button")
        visitor.wait_for("document.querySelector('#total').textContent === '96'")
        visitor.wait_for("document.querySelector('#replicas [aria-pressed=true] .id').textContent === 'r1'")
        visitor.page.click("#why")
        visitor.wait_for("document.querySelector('#explained').textContent.startsWith('r1: ')")
        assert "0 running, 0 waiting" in visitor.text("#replicas")
        assert visitor.complaints == []
        calls.hosted.pop("r1")
        visitor.wait_for("document.querySelector('#total').textContent === '64'")
        visitor.wait_for("document.querySelectorAll('#replicas button').length === 1")
        visitor.context.close()


@needs_browser
def test_nobody_asks_while_the_tab_is_hidden(server, visit):
    visitor = visit(server).is_live()
    wait_until(lambda: visitor.page.wait_for_timeout(50) or visitor.polls() >= 2)
    visitor.look_away(True)
    visitor.page.wait_for_selector("#status[data-state=paused]")
    polls = visitor.polls()
    visitor.page.wait_for_timeout(2500)
    assert visitor.polls() == polls
    visitor.look_away(False)
    visitor.is_live()
    assert visitor.polls() > polls


@needs_browser
def test_it_says_that_the_server_is_away_and_comes_back_by_itself(batcher, visit):
    with served(batcher) as server:
        visitor = visit(server).is_live()
    visitor.page.wait_for_selector("#away:not([hidden])")
    assert visitor.text("#away").startswith("The server does not answer. This page tries again by itself.")
    with served(batcher, port=server.port):
        visitor.is_live()
        assert visitor.page.is_hidden("#away")
        visitor.context.close()


@needs_browser
def test_what_comes_from_elsewhere_is_text(batcher, visit):
    chunks = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in (EVIL[:9], EVIL[9:])]
    with served(batcher, ServeOptions(served_model_names=(EVIL,))) as server:
        visitor = visit(server).is_live()
        assert visitor.text("#model") == EVIL
        visitor.page.route("**/v1/chat/completions", lambda route: route.fulfill(
            content_type="text/event-stream", body=sse(chunks)))  # fmt: skip
        visitor.ask(EVIL)
        visitor.page.wait_for_selector(".answer[aria-busy=false]")
        assert visitor.text(".said.user") == visitor.text(".answer .said") == EVIL
        assert visitor.page.query_selector("main img") is None
        assert visitor.page.title() == f"{EVIL} · hfpaged"
        visitor.context.close()


def sse(events):
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
def test_it_fits_where_it_is_shown(server, visit, slowly, width, scheme, tmp_path):
    visitor = visit(server, viewport={"width": width, "height": 800}, color_scheme=scheme).is_live()
    visitor.ask(f"{TEXT} {'x' * 300}", max_tokens=1000)
    visitor.wait_for("document.querySelector('#requests .state.running')")
    picture = tmp_path / f"page-{width}-{scheme}.png"
    visitor.page.screenshot(path=picture, full_page=True)
    print(f"a picture of the page: {picture}")
    assert visitor.page.evaluate("document.documentElement.scrollWidth") <= width
    ground = visitor.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.search(r"\d+", ground)[0]) < 128) == (scheme == "dark")
    assert picture.stat().st_size > 20_000
    visitor.page.click("#stop")


@needs_browser
def test_it_can_be_used_by_keyboard_alone(server, visit):
    visitor = visit(server).is_live()
    reached, names = [], set()
    for _ in range(30):
        visitor.page.keyboard.press("Tab")
        reached.append(visitor.page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"map", "prompt", "max-tokens", "temperature", "why", "send"} <= set(reached)
    for handle in visitor.page.query_selector_all("input, textarea, canvas, button"):
        names.add(handle.evaluate("n => n.ariaLabel || n.labels?.[0]?.textContent || n.textContent"))
    assert all(names)


def test_the_page_may_load_nothing_and_run_only_what_is_in_it(batcher):
    with served(batcher) as server:
        answer = server.client.get("/")
    policy = answer.headers["content-security-policy"]
    assert answer.headers["content-type"].startswith("text/html")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "*" not in policy
    assert set(re.findall(r"https?://[^\"' ]+", answer.text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\.innerHTML|insertAdjacentHTML|outerHTML|document\.write|\beval\(", answer.text)


def test_the_page_is_a_part_of_the_package(tmp_path):
    assert resources.files("hfpaged.serve").joinpath("page/index.html").is_file()
    assert load_page().html.startswith("<!doctype html>")
    root = Path(__file__).parent.parent
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=root, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    assert "hfpaged/serve/page/index.html" in zipfile.ZipFile(wheel).namelist()
