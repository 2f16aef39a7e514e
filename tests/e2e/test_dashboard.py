"""The live page in a real browser: its cells are those of the plan log, and it asks nobody else for anything."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from executor_svc.script import Script
from tests.scheduler.logged_cells import Cell, read_cells

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = os.environ.get("GILIR_TEST_CHROMIUM") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

CELLS = """() => [...gilir.store.lanes.values()].flatMap((lane) => lane.rows.map((row) => [lane.epoch, row.it, row.lost,
  [...row.kinds].flatMap((kind, slot) => {
    if (kind !== gilir.DECODE && kind !== gilir.PREFILL) return [];
    const name = gilir.store.names.get(row.sequences[slot]);
    return [[slot, name.id, name.index, kind === gilir.DECODE ? "decode" : "prefill", row.chunks.get(slot) ?? 1]];
  }), row.left.map(({ sequence, how }) => [gilir.store.names.get(sequence).id, how])]))"""
BLOCKS = """() => [...gilir.strips.values()].filter(({ lane }) => lane.blocks).map(({ blocks, lane }) => {
  const { width, height } = blocks.canvas, pitch = width / blocks.columns;
  const { data } = blocks.canvas.getContext("2d").getImageData(0, 0, width, height);
  return { info: lane.info, ...lane.blocks, cells: [...lane.blocks.states].map((state, cell) => {
    const x = Math.floor((cell % blocks.columns) * pitch), y = Math.floor(cell / blocks.columns) * pitch + 2;
    const at = 4 * (Math.floor(y) * width + x), sequence = blocks.sequenceOf(cell);
    return [Number(state), sequence === null ? null : gilir.store.nameOf(sequence), data.slice(at, at + 3).join()];
  }) };
})"""
PIXELS = """() => [...gilir.strips.values()].map((strip) => {
  const { width, height } = strip.painter.cell, { canvas } = strip;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const rows = strip.lane.rows.slice(-strip.columns);
  return rows.map((row, place) => {
    const x = (strip.columns - rows.length + place) * width + (width >> 1);
    const at = (slot) => 4 * ((slot * height + Math.floor(height / 2)) * canvas.width + x);
    return [row.it, Array.from(row.kinds, (_, slot) => data.slice(at(slot), at(slot) + 3).join())];
  });
})"""
SUMMARY = """() => {
  const at = (list, share) => [...list].sort((a, b) => a - b)[Math.floor(share * (list.length - 1))];
  const { drawMs, gapMs, painted, count } = gilir.frames;
  return { frames: count, columns: painted, draw_p50: at(drawMs, 0.5), draw_p95: at(drawMs, 0.95),
           frame_p50: at(gapMs, 0.5), frame_p95: at(gapMs, 0.95) };
}"""


class Browser:
    """A page at the service's dashboard; what it complains of, and whom it asks, is kept."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.complaints: list[str] = []
        self.asked: set[str] = set()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.page.goto(url + "/dashboard")
        self.page.wait_for_selector("#link[data-state=live]")
        self._url = url

    def check(self) -> None:
        """Nothing went wrong, and nothing was asked for elsewhere."""
        assert not self.complaints
        assert all(url.startswith(self._url + "/dashboard") for url in self.asked), self.asked

    def wait(self, condition: str) -> None:
        """Poll from here: the page's policy forbids it to evaluate text itself."""
        deadline = time.monotonic() + 90
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, condition
            self.page.wait_for_timeout(50)


@contextmanager
def opened(url: str, **options: Any) -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            yield Browser(browser, url, **options)
        finally:
            browser.close()


def load(stack: Any, pool: ThreadPoolExecutor, count: int) -> list[Any]:
    draw = random.Random(5)
    return [
        pool.submit(
            stack.text,
            [3 + draw.randrange(90) for _ in range(draw.choice([5, 30, 70]))],
            draw.choice([3, 12, 30]),
            request_id=f"load-{i}",
        )
        for i in range(count)
    ]


def test_the_cells_on_the_page_are_those_of_the_plan_log(start: Callable[..., Any]) -> None:
    stack = start("--max-num-seqs", "6", "--max-num-batched-tokens", "48")
    # Few blocks: some are preempted.
    stack.fake("gpu-0", Script(delay_s=0.003), num_blocks=12, max_num_seqs=6)
    doomed = stack.fake("gpu-1", Script(delay_s=0.003), num_blocks=12, max_num_seqs=6)
    stack.ready()
    with opened(stack.url, viewport={"width": 1300, "height": 800}) as browser, ThreadPoolExecutor(16) as pool:
        answers = load(stack, pool, 32)
        browser.wait("gilir.store.lanes.size === 2 && [...gilir.store.lanes.values()].every((l) => l.rows.length > 8)")
        doomed.kill()
        for answer in answers:
            answer.result()
        stack.until_idle()
        assert stack.text([3, 4, 5], 4, request_id="the-last")
        browser.wait("[...gilir.store.names.values()].some((name) => name.id === 'the-last')")
        browser.page.wait_for_timeout(600)
        shown = browser.page.evaluate(CELLS)
        pixels = browser.page.evaluate(PIXELS)
        browser.page.keyboard.press("Space")
        assert browser.page.inner_text("#pause") == "Live"
        browser.page.keyboard.press("ArrowLeft")
        for _ in range(3):
            browser.page.keyboard.press("ArrowDown")
        assert "seat 2" in browser.page.inner_text("#readout")
        browser.check()
    compare(shown, stack.services.plan_log)
    colours_are_those_of_the_cells(shown, pixels)


def test_the_map_shows_who_holds_each_block(start: Callable[..., Any]) -> None:
    stack = start("--max-num-seqs", "4")
    stack.fake("gpu-0", Script(delay_s=0.02), num_blocks=40, max_num_seqs=4)
    stack.ready()
    with opened(stack.url, viewport={"width": 1300, "height": 800}) as browser, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(stack.text, [3 + i, 4, 5], 150, request_id=f"held-{i}") for i in range(2)]
        browser.wait("gilir.strips.size === 1 && [...gilir.strips.values()][0].lane.blocks !== null")
        browser.page.click("summary")
        browser.wait(
            "(() => { const [{ lane, blocks }] = gilir.strips.values(); return lane.info.running === 2 &&"
            " blocks.drawn?.told === lane.blocks && new Set(lane.blocks.s).size === 3; })()"
        )
        (told,) = browser.page.evaluate(BLOCKS)
        assert told["step"] == 1 and len(told["cells"]) == told["info"]["blocks"] == 40
        held = [(name, colour) for state, name, colour in told["cells"] if state == 2]
        assert len(held) == told["info"]["blocks_referenced"]
        assert {name for name, _ in held} == {"held-0", "held-1"}
        assert len(set(held)) == len({colour for _, colour in held}) == 2, held
        browser.check()
        for answer in answers:
            answer.result()


def compare(shown: list[Any], log: Path) -> None:
    logged = read_cells(log)
    cells: dict[tuple[int, int], dict[int, Cell]] = {}
    preempted: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for epoch, iteration, _lost, row, left in shown:
        if row:
            cells[epoch, iteration] = {slot: (name, index, kind, n) for slot, name, index, kind, n in row}
        gone = {(name, 0) for name, how in left if how == 5}
        if gone:
            preempted[epoch, iteration] = gone
    # The first ones may have been planned before the page was open.
    missing = logged.cells.keys() - cells.keys()
    assert len(missing) <= 2 and len(cells) > 60, missing
    assert cells == {at: logged.cells[at] for at in cells}
    assert preempted == logged.preempted and preempted
    assert {(epoch, iteration) for epoch, iteration, lost, *_ in shown if lost} == logged.lost != set()


def colours_are_those_of_the_cells(shown: list[Any], pixels: list[Any]) -> None:
    """The middle of every cell: one colour a sequence in its decodes, and another than that of idle seats."""
    decodes: dict[str, set[str]] = {}
    idle: set[str] = set()
    by_epoch: dict[int, dict[int, Any]] = {}
    lost = {(epoch, iteration) for epoch, iteration, is_lost, *_ in shown if is_lost}
    for epoch, iteration, _, row, left in shown:
        by_epoch.setdefault(epoch, {})[iteration] = {c[0]: c for c in row}, left
    for (epoch, rows), drawn in zip(by_epoch.items(), pixels, strict=True):
        for iteration, colours in drawn:
            cells, left = rows[iteration]
            for slot, colour in enumerate(colours):
                if (epoch, iteration) in lost or left:
                    continue
                if slot not in cells:
                    idle.add(colour)
                elif cells[slot][3] == "decode":
                    decodes.setdefault(cells[slot][1], set()).add(colour)
    assert len(decodes) > 20 and all(len(colours) == 1 for colours in decodes.values()), decodes
    assert not idle & set().union(*decodes.values())
    assert len({*map(min, decodes.values())}) > len(decodes) * 0.9, "sequences are told apart"


@pytest.mark.nightly
def test_256_seats_and_600_iterations_are_drawn_within_a_frame(start: Callable[..., Any]) -> None:
    """Prints what frames cost; asserts with room for a busy machine, since nothing but new columns is drawn."""
    stack = start("--max-num-seqs", "256", "--max-num-batched-tokens", "1024")
    stack.fake(num_blocks=8192, max_num_seqs=256, max_num_batched_tokens=1024)
    stack.ready()
    with (
        opened(stack.url, viewport={"width": 1500, "height": 900}) as browser,
        ThreadPoolExecutor(8) as pool,
    ):
        for i in range(8):
            pool.submit(stack.complete, [[3 + i, 4 + k] for k in range(32)], 900)
        browser.page.evaluate("gilir.view.zoom = 0")
        browser.wait("Math.max(...[...gilir.store.lanes.values()].map((lane) => lane.rows.length)) >= 600")
        browser.page.evaluate("gilir.resetFrames()")
        browser.page.wait_for_timeout(2500)
        costs = browser.page.evaluate(SUMMARY)
        print(costs)
        assert costs["columns"] > 10 and costs["frames"] > 40
        assert costs["draw_p50"] < 16.7
        browser.check()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_a_phone_shows_it_without_scrolling_sideways(start: Callable[..., Any], scheme: str) -> None:
    stack = start("--max-num-seqs", "6")
    stack.fake(max_num_seqs=6)
    stack.ready()
    with opened(stack.url, viewport={"width": 360, "height": 740}, color_scheme=scheme) as browser:
        stack.text([3, 4, 5], 30, request_id="phone")
        browser.wait("gilir.store.newest > 0")
        browser.page.wait_for_timeout(700)
        longest = "document.querySelector('.blocks summary').textContent += ', one in 1234 is shown'"
        assert browser.page.evaluate(f"({longest}, document.documentElement.scrollWidth)") == 360
        browser.page.keyboard.press("Tab")
        assert browser.page.evaluate("document.activeElement.id") == "pause"
        outline = browser.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        browser.check()


@pytest.mark.nightly
def test_a_key_is_asked_for_and_kept_in_the_tab_alone(start: Callable[..., Any]) -> None:
    stack = start("--api-key", "a-secret")
    stack.services.start_executor(module="executor_svc.fake")
    stack.client.headers["authorization"] = "Bearer a-secret"
    stack.until(lambda: stack.client.get("/v1/models").json().get("data"), "the model to be listed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        page = browser.new_page()
        page.goto(stack.url + "/dashboard")
        page.fill("#key", "a-secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#link[data-state=live]")
        assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
        browser.close()
