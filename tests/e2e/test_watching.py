"""A server under load, as it is watched: Prometheus, Grafana, whoever opens its page.

Over 400 lines: all share one server under load, and one browser.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess, hold_port, port_of
from ellm_sgl.serve.cli import main
from tests.e2e import browser, page
from tests.e2e.browser import ARTIFACTS, Browser
from tests.e2e.load import ask, greedy, prompts
from tests.e2e.scripted_policies import install
from tests.servers import STRICT
from tests.sglang.test_metrics import promtool_says, queries

pytestmark = pytest.mark.slow

ADMIN_KEY = "for the administrator"
ARGUMENTS = (
    *DEMO_ARGUMENTS,
    "--ellm-policy", "fcfs", "--ellm-tpot-slo-ms", "200",
    "--ellm-device-kv-tokens", "2400", "--ellm-host-kv-tokens", "640",
    "--ellm-layer-group", "1",
    "--enable-metrics", "--admin-api-key", ADMIN_KEY,
)  # fmt: skip

RID = "<img src=x onerror=document.title='broken'>"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    environment = STRICT | install(tmp_path_factory.mktemp("policies"))
    with ServerProcess(ARGUMENTS, environment) as server:
        yield server
        assert server.state()["integrity"] == "ok"


def put_under_load(server: ServerProcess, requests: int = 16, tokens: int = 120) -> None:
    """More KV than the device holds, some of it with SLOs."""
    slos = {"tpot_slo_ms": 1000, "ttft_slo_ms": 0.001}
    bodies = [greedy(p, tokens) for p in prompts(requests, 100, 150)]
    ask(server.url, [body | (slos if i % 2 else {}) for i, body in enumerate(bodies)])


def figures(server: ServerProcess) -> dict[str, float]:
    """What `/metrics` says of eLLM, by name, summed over labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).raise_for_status().text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("ellm_"):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_metrics_are_what_the_state_says(watched: ServerProcess) -> None:
    before = settled(watched)  # SGLang's own first request
    put_under_load(watched)
    told = settled(watched)
    assert told["ellm_evicted_units_total"] > 0 and told["ellm_fetched_bytes_total"] > 0
    ended = told["ellm_slo_requests_total"] - before["ellm_slo_requests_total"]
    assert ended == 16 + 8, "a TPOT SLO for all, a TTFT SLO for half"


def test_a_server_that_stands_says_what_it_is(watched: ServerProcess) -> None:
    told = watched.log.read_text(errors="replace").partition("eLLM is on\n")[2]
    screen = dict(line.split(maxsplit=1) for line in told.splitlines()[:7])
    assert list(screen) == ["model", "memory", "KV", "policy", "SLO", "machine", "look"]
    assert "8 layers" in screen["model"] and "weights" in screen["memory"]
    assert "2,400 tokens on the device, 640 on the host" in screen["KV"]
    assert (screen["policy"], screen["SLO"]) == ("fcfs", "200 ms per token")
    assert "GFLOP/s" in screen["machine"] and f"{watched.url}/ellm/" in screen["look"]


def test_top_shows_a_server_at_work(watched: ServerProcess) -> None:
    """What it draws is there under the names it looks for: requests, memory, decisions."""

    def top(option: str) -> str:
        told = CliRunner().invoke(main, ["top", "--url", watched.url, option])
        assert told.exit_code == 0, told.output
        return told.stdout

    deadline = time.monotonic() + 60
    with under_load(watched):
        while "Nobody is being served." in (drawn := top("--once")):
            assert time.monotonic() < deadline, drawn
        document = json.loads(top("--json"))
    assert document["state"]["policy"]["name"] in drawn and document["decisions"]


def test_promtool_reads_all_and_has_nothing_to_say_of_ours(watched: ServerProcess) -> None:
    """Of a live server's metrics, which several processes write. SGLang's names have a colon each,
    which promtool says, and what else it has to say of them is for SGLang."""
    text = httpx.get(f"{watched.url}/metrics", timeout=60).raise_for_status().content
    assert text.count(b"# TYPE ellm_") > 20 and b"# TYPE sglang:" in text
    complaints = promtool_says(text).splitlines()
    assert [line for line in complaints if not line.startswith("sglang:")] == []


def settled(server: ServerProcess) -> dict[str, float]:
    """Figures of an idle server, once they are what its state says: the last of them come with the
    next turn of its scheduler."""
    counted = ("evicted_units", "restored_units", "saved_units", "recomputed_tokens",
               "retractions", "pauses")  # fmt: skip
    deadline = time.monotonic() + 60
    while True:
        state, told = server.state(integrity=False), figures(server)
        wanted = {f"ellm_{name}_total": state[f"{name}_total"] for name in counted}
        wanted |= {
            "ellm_step_seconds_count": state["steps_total"],
            "ellm_device_committed_bytes": state["device_bytes_committed"],
            "ellm_requests": 0,
        }
        differing = {name: (told.get(name, 0), n) for name, n in wanted.items()
                     if told.get(name, 0) != n}  # fmt: skip
        if not differing:
            return told
        assert time.monotonic() < deadline, differing
        time.sleep(0.2)


@pytest.fixture
def prometheus(watched: ServerProcess, tmp_path: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the server."""
    if (program := shutil.which("prometheus")) is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "scrape_configs:\n"
        "- job_name: sglang\n"
        "  scrape_interval: 1s\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{watched.port}']}}]\n"
    )
    held = hold_port()
    address = f"127.0.0.1:{port_of(held)}"
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
    try:
        become_ready(f"http://{address}")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()
        held.close()


def become_ready(prometheus: str) -> None:
    """Queries are refused before: it answers before it has read what it stores."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{prometheus}/-/ready", trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"{prometheus} is not ready after 60 s")


def results(prometheus: str, query: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, trust_env=False)
    assert answer.status_code == 200, f"{query}: {answer.text}"
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return [one for one in found if one["value"][1] != "NaN"]


def test_every_query_of_the_dashboard_has_an_answer(
    watched: ServerProcess, prometheus: str
) -> None:
    filled = {"$model": ".*", "$instance": ".*", "$__rate_interval": "1m"}
    asked = list(queries())
    for variable, value in filled.items():
        asked = [query.replace(variable, value) for query in asked]
    assert len(asked) > 20 and not any("$" in query for query in asked)
    with ThreadPoolExecutor(1) as background:
        deadline = time.monotonic() + 180
        load = background.submit(put_under_load, watched)
        while asked := [query for query in asked if not results(prometheus, query)]:
            assert time.monotonic() < deadline, asked
            if load.done():
                load = background.submit(put_under_load, watched)
            time.sleep(1)


@pytest.fixture(scope="module")
def opened(watched: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser on the server's page."""
    if (problem := browser.lacking()) is not None:
        pytest.skip(problem)
    with browser.chromium(tmp_path_factory.mktemp("browser") / "log") as window:
        window.size(1280, 1000)
        window.open(f"{watched.url}/ellm/")
        window.wait("return document.getElementById('link').dataset.state === 'live'")
        yield window


MISSING = "return document.querySelectorAll('.bar i.host, .bar i.lost').length > 0"


@contextlib.contextmanager
def under_load(server: ServerProcess) -> Iterator[None]:
    """More than the device holds, again and again. One request has an SLO that nobody could keep,
    half of the others one that is wider than the server's."""
    stop = threading.Event()
    slos: list[dict[str, float]] = [{}, {"tpot_slo_ms": 1000}]
    bodies = [greedy(prompts(1, 90, 90)[0], 60) | {"rid": RID, "tpot_slo_ms": 0.1}]
    bodies += [greedy(p, 100) | slos[i % 2] for i, p in enumerate(prompts(18, 100, 150))]

    def run() -> None:
        while not stop.is_set():
            ask(server.url, bodies)

    with ThreadPoolExecutor(1) as background:
        running = background.submit(run)
        try:
            yield
        finally:
            stop.set()
        running.result()


@pytest.fixture
def load(watched: ServerProcess) -> Iterator[None]:
    """While a test looks at the page."""
    with under_load(watched):
        yield


@pytest.mark.usefixtures("load")
def test_the_page_shows_what_happens(opened: Browser) -> None:
    opened.wait(MISSING)
    opened.wait("return document.querySelector('#device .used').offsetWidth > 0")
    opened.wait("return document.getElementById('decisions').children.length > 3")
    opened.wait("return document.getElementById('decoding').textContent > '0'")
    assert opened.run("return document.getElementById('policy-name').textContent") == "fcfs"
    # Between two loads there is nobody whose bar could be looked at.
    bar = "const bar = document.querySelector('.bar'); return bar && getComputedStyle(bar).display"
    assert opened.wait(bar) == "flex"
    for scheme in ("dark", "light"):
        opened.prefer(scheme)
        opened.wait(MISSING)
        opened.screenshot(ARTIFACTS / f"page-{scheme}.png")
    opened.size(360, 780, 2)
    try:
        wide = "return document.documentElement.scrollWidth - window.innerWidth"
        assert opened.run(wide) <= 0, "a phone would scroll sideways"
        opened.screenshot(ARTIFACTS / "page-phone.png")
    finally:
        opened.size(1280, 1000)


def post(server: ServerProcess, path: str, **body: Any) -> None:
    key = {"Authorization": f"Bearer {ADMIN_KEY}"}
    httpx.post(f"{server.url}/{path}", json=body, headers=key, timeout=60).raise_for_status()


@contextlib.contextmanager
def standing_still(server: ServerProcess) -> Iterator[None]:
    """In the middle of its work: what it answers stays the same."""
    post(server, "pause_generation", mode="in_place")
    try:
        yield
    finally:
        post(server, "continue_generation")


Telling = dict[str, Callable[[dict[str, Any], dict[str, Any]], bool]]
"""By what there is to be seen: whether it is, by the state and by what is told of requests."""

PRESSED: Telling = {
    "paused": lambda _, seen: any(row["state"] == "paused" for row in seen["requests"]),
    "to be paused": lambda _, seen: any(made["paused"] for made in seen["decisions"][:4]),
    "batch": lambda _, seen: seen["requests"] and seen["steps"]["batch"] > 0,
    "r": lambda _, seen: 0 < seen["uncached_ratio"] < 1,
    "host": lambda state, _: 0 < page.in_use(state, "host")[1] < 640,
    "missing, on the host": lambda _, seen: page.tokens_that_are(seen, "host") > 0,
    "missing, to recompute": lambda _, seen: page.tokens_that_are(seen, "lost") > 0,
    "SLOs kept": lambda _, seen: len(page.paced(seen)) > page.missed(seen),
}
FAULTY: Telling = {
    "fallbacks": lambda state, _: state["policy"]["fallbacks"].get("exception", 0) > 0,
    "replaced": lambda _, seen: len({made["replaced"] for made in seen["decisions"][:4]}) == 2,
    "SLOs missed": lambda _, seen: page.missed(seen) > 0,
}


def compare(window: Browser, server: ServerProcess, telling: Telling) -> None:
    """Compare all that the page shows, as often as something of this is first to be seen."""

    def look() -> page.Answers:
        urls = (f"{server.url}/ellm/{name}" for name in ("state", "requests"))
        state, seen = (httpx.get(url, timeout=60).raise_for_status().json() for url in urls)
        return state, seen

    unseen, deadline = set(telling), time.monotonic() + 120
    while unseen:
        assert time.monotonic() < deadline, unseen
        with standing_still(server):
            now = look()
            if there := {name for name in unseen if telling[name](*now)}:
                page.wait_until_it_shows(window, look)
                unseen -= there
        time.sleep(0.1)


@pytest.mark.usefixtures("load")
def test_figures_are_the_servers(opened: Browser, watched: ServerProcess) -> None:
    compare(opened, watched, PRESSED)


def test_bars_move_and_fallbacks_are_shown(opened: Browser, watched: ServerProcess) -> None:
    """Of a policy that fails at every second question, and leaves half uncached otherwise."""
    post(watched, "ellm/policy", name="faulty", options={"how": "raise"})
    with under_load(watched):
        try:
            page.wait_until_bars_move(opened)
            compare(opened, watched, FAULTY)
        finally:
            post(watched, "ellm/policy", name="fcfs", options={})


@pytest.mark.usefixtures("load")
def test_names_that_clients_give_are_text(opened: Browser) -> None:
    names = "return [...document.querySelectorAll('.rid')].map((rid) => rid.title)"
    opened.wait(f"return (() => {{ {names} }})().some((name) => name.startsWith('<img'))")
    assert opened.run("return document.querySelectorAll('main img').length") == 0
    assert opened.run("return document.title") == "eLLM"


def test_the_colours_are_those_of_the_system(opened: Browser) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    colours = set()
    for scheme in ("dark", "light"):
        opened.prefer(scheme)
        colours.add(opened.run(ground))
    assert len(colours) == 2


def test_the_keyboard_reaches_and_changes_everything(
    opened: Browser, watched: ServerProcess
) -> None:
    """The wrong key first: nothing changes, and the page says so."""
    opened.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached = opened.tab_to("pool")
    assert {"hold", "key", "policy", "options"} <= set(reached)
    opened.run("document.getElementById('pool').select()")
    opened.press("1600", "Enter")
    outcome = "return document.getElementById('outcome').textContent"
    assert "admin key" in opened.wait(outcome)
    assert watched.state(integrity=False)["resize"]["wanted_tokens"] == 2400
    refused = opened.log("browser")
    assert all("401" in entry["message"] for entry in refused), refused
    opened.tab_to("key")
    opened.press(ADMIN_KEY)
    opened.tab_to("pool")
    opened.run("document.getElementById('pool').select()")
    opened.press("1600", "Enter")
    opened.wait(f"{outcome}.includes('goes to 1,600')")
    assert watched.state(integrity=False)["resize"]["wanted_tokens"] == 1600
    opened.tab_to("policy")
    opened.press("stock")
    opened.tab_to("options")
    opened.press("Enter")
    opened.wait(f"{outcome}.includes('stock')")
    assert watched.state(integrity=False)["policy"]["name"] == "stock"
    opened.wait("return document.getElementById('policy-name').textContent === 'stock'")


HIDDEN = (
    "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    "document.dispatchEvent(new Event('visibilitychange'))"
)


@pytest.mark.parametrize(
    ("stop", "go_on"),
    [
        ("document.getElementById('hold').click()",) * 2,
        (HIDDEN % "true", HIDDEN % "false"),
    ],
    ids=["held", "in a hidden tab"],
)
def test_a_page_that_nobody_looks_at_asks_for_nothing(
    opened: Browser, stop: str, go_on: str
) -> None:
    opened.run(stop)
    deadline = time.monotonic() + 60
    while opened.requested():  # what was under way
        assert time.monotonic() < deadline
        time.sleep(1.5)
    time.sleep(2.5)
    assert opened.requested() == []
    opened.run(go_on)
    opened.wait("return performance.getEntriesByType('resource').length > 0")
    opened.wait("return document.getElementById('link').dataset.state === 'live'")


def test_the_page_needs_nothing_from_outside(opened: Browser, watched: ServerProcess) -> None:
    opened.open(f"{watched.url}/ellm/")
    opened.wait("return document.getElementById('link').dataset.state === 'live'")
    asked = {url for url in opened.requested() if not url.startswith("data:")}
    assert {f"{watched.url}/ellm/{name}" for name in ("", "page.js", "state")} <= asked
    assert {url for url in asked if not url.startswith(f"{watched.url}/")} == set()
    assert [entry for entry in opened.log("browser") if entry["level"] != "DEBUG"] == []
