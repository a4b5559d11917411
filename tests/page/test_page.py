"""The page in a real browser, over a made-up service: what it shows, to whom, and how fast.

Bad input: hostile text, a wrong key, a policy that goes, a service that is down, a page left open.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.page import made_runs
from tests.page.made_runs import BAD_GROUP, BAD_ROLLOUT, BAD_TOKEN, HOSTILE, MadeRun
from tests.page.made_service import MadeService, made_service

pytestmark = [pytest.mark.more]
IMAGES = Path(__file__).parents[2] / "docs" / "images"
OpenPage = Callable[..., Page]
BAD_STEP = 37
RUN = MadeRun(policy_id="sums-grpo", num_steps=50, bad=BAD_STEP, seed=2)
OTHER = MadeRun(policy_id="sums-dapo", num_steps=44, seed=1)
VIEWS = {
    "policies": "#/",
    "policy": "#/policies/sums-grpo",
    "step": f"#/policies/sums-grpo/steps/{BAD_STEP}",
    "rollout": f"#/policies/sums-grpo/steps/{BAD_STEP}/rollouts/5/3?token=17",
    "operations": "#/operations",
}


@pytest.fixture(scope="module")
def made() -> Iterator[MadeService]:
    with made_service(RUN, OTHER) as running:
        yield running


def _settled(page: Page) -> None:
    """Wait until the view has been read and drawn."""
    expect(page.locator("main")).to_have_attribute("aria-busy", "false")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_a_bad_rollout_is_three_clicks_away(made: MadeService, open_page: OpenPage) -> None:
    page = open_page(made.url)
    page.get_by_role("link", name="sums-grpo").first.click()
    marks = page.get_by_role("group", name="Marks of reward")
    marks.get_by_role("link", name=f"Step {BAD_STEP}: dominant rollout").click()
    offenders = page.get_by_role("list", name="Rollouts that dominant rollout names, worst first")
    offenders.get_by_role("link").first.click()
    title = f"Rollout {BAD_ROLLOUT} of group {BAD_GROUP}"
    expect(page.get_by_role("heading", level=1)).to_contain_text(title)
    expect(page.locator(".token.selected")).to_have_attribute("data-i", str(BAD_TOKEN))
    expect(page.get_by_role("status").filter(has_text="gap")).to_contain_text("gap −8.31")


def test_the_keyboard_reaches_a_rollout(made: MadeService, open_page: OpenPage) -> None:
    """A chart is a slider: arrows go along the steps, and say their values; Enter opens one."""
    page = open_page(made.url + VIEWS["policy"])
    slider = page.get_by_role("slider", name="gradient norm")
    slider.focus()
    for _ in range(RUN.num_steps - BAD_STEP + 1):
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    norm = RUN.figures()["grad_norm"][BAD_STEP - 1]
    assert norm is not None
    said = f"step {BAD_STEP}: {norm:.4g}, dominant rollout"
    expect(slider).to_have_attribute("aria-valuetext", said)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Step {BAD_STEP}")
    forest = page.get_by_role("application", name="Prefix forest")
    forest.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#said")).to_contain_text("1 rollout, reward")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Rollout 0 of group 0")
    expect(page.locator("#main")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    made: MadeService, open_page: OpenPage, scheme: str, request: pytest.FixtureRequest
) -> None:
    """Every view at both widths; none is wider than its window. `--write-images` keeps pictures."""
    for width in (1440, 390):
        page = open_page(made.url, color_scheme=scheme, viewport={"width": width, "height": 900})
        for name, place in VIEWS.items():
            page.goto(made.url + place)
            _settled(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
            if width == 1440:
                found = Axe().run(page).response["violations"]
                bad = [one for one in found if one["impact"] in ("serious", "critical")]
                told = [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in bad]
                assert not told, name
            if request.config.getoption("--write-images") and name != "operations":
                IMAGES.mkdir(exist_ok=True)
                page.screenshot(path=IMAGES / f"page-{name}-{width}-{scheme}.png")


def test_hostile_text_is_shown_as_text(open_page: OpenPage) -> None:
    run = MadeRun(policy_id="hostile", num_steps=5, bad=5, hostile=True)
    shown = HOSTILE.replace("\x1b", "␛").replace("\u202e", "⟨202e⟩")
    with made_service(run) as service:
        page = open_page(service.url + "#/policies/hostile")
        expect(page.get_by_role("list").filter(has_text="step 5")).to_contain_text("<img src=x")
        page.goto(service.url + "#/policies/hostile/steps/5")
        expect(page.locator(".warning").first).to_contain_text(shown)
        page.goto(service.url + "#/policies/hostile/steps/5/rollouts/5/3?token=17")
        expect(page.locator(".token.selected")).to_have_text(shown)
        assert page.locator("main img, main script").count() == 0
        assert page.title().endswith("Ratoon")


def test_a_key_is_asked_once_and_kept_for_the_tab(open_page: OpenPage) -> None:
    with made_service(RUN, key="ratoon_k_secret") as service:
        page = open_page(service.url)
        dialog = page.get_by_role("dialog", name="This service asks for a key")
        for text in ("wrong", "ratoon_k_secret"):
            field = dialog.get_by_label("API key")
            expect(field).to_have_attribute("type", "password")
            field.fill(text)
            dialog.get_by_role("button", name="Continue").click()
            if text == "wrong":
                expect(dialog).to_contain_text("unknown, revoked or expired")
        expect(page.get_by_role("link", name="sums-grpo").first).to_be_visible()
        expect(dialog).to_be_hidden()
        page.reload()
        expect(page.get_by_role("link", name="sums-grpo").first).to_be_visible()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert "secret" not in page.content() + page.url
        page.get_by_role("button", name="Forget key").click()
        expect(dialog).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0


def test_new_steps_come_by_themselves_unless_nobody_looks(open_page: OpenPage) -> None:
    run = MadeRun(policy_id="growing", num_steps=10, points=made_runs._figures(30, None, 0))
    hidden = """
        let hidden = false;
        Object.defineProperty(document, "hidden", { get: () => hidden });
        globalThis.hide = (is) => {
          hidden = is;
          document.dispatchEvent(new Event("visibilitychange"));
        };
    """
    with made_service(run) as service:
        page = open_page(service.url + "#/policies/growing", init=hidden)
        slider = page.get_by_role("slider", name="reward", exact=True)
        expect(slider).to_have_attribute("aria-valuemax", "10")
        service.runs["growing"] = MadeRun(policy_id="growing", num_steps=20, points=run.points)
        expect(slider).to_have_attribute("aria-valuemax", "20")
        page.evaluate("hide(true)")
        expect(page.get_by_text("Paused")).to_be_visible()
        asked = service.asked.total()
        page.wait_for_timeout(6000)
        assert service.asked.total() == asked
        service.runs["growing"] = MadeRun(policy_id="growing", num_steps=30, points=run.points)
        page.evaluate("hide(false)")
        expect(slider).to_have_attribute("aria-valuemax", "30")


def test_a_page_where_nothing_happens_asks_for_little(open_page: OpenPage) -> None:
    """Two minutes by its clock: no steps, lists each 30 s, the policy less and less often."""
    policy = "/v1/policies/{policy}"
    with made_service(RUN) as service:
        page = open_page(service.url + "#/no/such/view")
        page.clock.install()
        page.goto(service.url + VIEWS["policy"])
        _settled(page)
        page.clock.pause_at(page.evaluate("Date.now() + 1000"))
        for _ in range(120):
            page.clock.run_for(1000)
            page.wait_for_timeout(20)
        asked = service.asked
    assert asked[f"{policy}/steps"] == 2
    assert 2 <= asked[f"{policy}/weights"] == asked[f"{policy}/checkpoints"] <= 5
    assert 4 <= asked[policy] <= 16


def test_what_goes_wrong_is_said(open_page: OpenPage) -> None:
    """A service that is down is asked again; a policy that is deleted is asked for no more."""
    with made_service(RUN) as service:
        page = open_page(service.url + VIEWS["policy"])
        expect(page.get_by_text("Live")).to_be_visible()
        service.is_down = True
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("the engine does not answer. Trying again.")
        service.is_down = False
        expect(alert).to_be_hidden()
        del service.runs["sums-grpo"]
        expect(alert).to_have_text("policy_id: no policy sums-grpo.")
        asked = service.asked.total()
        page.wait_for_timeout(6000)
        assert service.asked.total() == asked
        page.goto(service.url + "#/no/such/view")
        expect(page.get_by_text("There is no such view.")).to_be_visible()


def test_a_page_left_open_keeps_no_more(made: MadeService, open_page: OpenPage) -> None:
    """A day of steps every four seconds: arrays stay bounded, and so does the heap."""
    page = open_page(made.url + "#/no/such/view")
    lengths = page.evaluate(
        """async () => {
            const { stepSeries, MOST } = await import("/page/series.js");
            let now = 0, most = 0;
            globalThis.fetch = async (url) => {
              const asked = new URL(url).searchParams;
              const after = Number(asked.get("after_seq") ?? 0);
              const count = Math.min(now - after, Number(asked.get("max_points")));
              const seq = Array.from({ length: count }, (_, i) => now - count + i + 1);
              const marks = seq.map((one) => ({ seq: one, version: one, warnings: ["w"] }));
              const series = [{ figure: "loss", mean: seq.map(() => 1), low: [], high: [] }];
              const times = { seq, version: [...seq], finished_at: [...seq] };
              const body = { ...times, series, marks, num_steps: count };
              return { ok: true, status: 200, json: async () => structuredClone(body) };
            };
            const series = stepSeries("p", () => ["loss"]);
            for (now = 1; now <= 21600; now += 1) {
              await series.read(undefined, { created_at: "epoch", next_seq: now + 1 });
              const { seq, marks, figures } = series.all;
              most = Math.max(most, seq.length, marks.length, figures.get("loss").mean.length);
            }
            return [most, series.all.seq.at(-1), MOST];
        }"""
    )
    most, last, bound = lengths
    assert last == 21600
    assert most <= 2 * bound + 1


DRAWN = """
    globalThis.drawn = 0;
    const stroke = CanvasRenderingContext2D.prototype.stroke;
    CanvasRenderingContext2D.prototype.stroke = function (...given) {
      globalThis.drawn = performance.now();
      return stroke.apply(this, given);
    };
"""


def test_a_hundred_thousand_steps_are_drawn_within_a_second(open_page: OpenPage) -> None:
    """From the last byte of the answer, which the service has binned, to the last line drawn."""
    run = MadeRun(policy_id="long", num_steps=100_000, bad=60_000)
    run.figures()
    with made_service(run) as service:
        page = open_page(service.url + "#/policies/long", init=DRAWN)
        expect(page.get_by_role("slider", name="reward", exact=True)).to_have_attribute(
            "aria-valuemax", "100000"
        )
        _settled(page)
        seconds = page.evaluate(
            """() => {
                const steps = performance.getEntriesByType("resource").filter(
                  (one) => one.name.includes("/steps?") && one.name.includes("figures="));
                return (drawn - Math.max(...steps.map((one) => one.responseEnd))) / 1000;
            }"""
        )
    assert 0 < seconds < 1


# Left edge and text of each label of a vertical axis.
LABELS = """
    window.labels = [];
    const fill = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
      if (this.textAlign === "right") labels.push([x - this.measureText(text).width, text]);
      fill.call(this, text, x, y);
    };
"""


@pytest.mark.parametrize("width", [1440, 390])
def test_labels_of_an_axis_are_whole_and_differ(open_page: OpenPage, width: int) -> None:
    """Losses near 1e-14 were labelled ".0e−14", and ratios near 1 all "1"."""
    run = MadeRun(policy_id="small", num_steps=20)
    for name, shift, scale in (("loss", 0, -1e-13), ("ratio_max", 1, 1e-4), ("entropy", 0, 1e9)):
        run.figures()[name] = [shift + scale * (value or 0) for value in run.figures()[name]]
    with made_service(run) as service:
        viewport = {"width": width, "height": 900}
        page = open_page(service.url + "#/policies/small", init=LABELS, viewport=viewport)
        _settled(page)
        labels = page.evaluate("labels")
    texts = {text for _, text in labels}
    assert [text for text in texts if "e−1" in text]
    assert len([text for text in texts if text.startswith("1.000")]) > 1
    assert "1\u202f000\u202f000\u202f000" in texts
    assert min(left for left, _ in labels) >= 0
    counts = page.evaluate(
        """async () => {
            const { ticks } = await import("/page/chart.js");
            return Array.from({ length: 2000 }, (_, i) => {
              const low = Math.sin(i) * 10 ** (i % 7 - 3);
              return ticks(low, low + (0.3 + i % 11) * 10 ** (i % 9 - 4), 2 + i % 5).length;
            });
        }"""
    )
    assert 2 <= min(counts) < max(counts) <= 8


def test_a_forest_of_ten_thousand_nodes_is_smooth(browser: Browser, open_page: OpenPage) -> None:
    """While it is dragged and zoomed, a frame's work leaves room for fifty frames a second."""
    forest = made_runs.large_forest(10_000)
    with made_service(RUN, forest=forest) as service:
        page = open_page(service.url + VIEWS["step"])
        plot = page.get_by_role("application", name="Prefix forest: 10 000 nodes")
        plot.scroll_into_view_if_needed()
        plot.focus()
        box = plot.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
        browser.start_tracing(page=page, categories=["devtools.timeline", "toplevel"])
        frames = page.evaluate(
            """async (plot) => {
                const box = plot.getBoundingClientRect();
                const at = (type, x, y, more) => {
                  const place = { clientX: box.left + x, clientY: box.top + y, pointerId: 1 };
                  const kind = type === "wheel" ? WheelEvent : PointerEvent;
                  plot.dispatchEvent(new kind(type, { cancelable: true, ...place, ...more }));
                };
                const begun = performance.now();
                let frames = 0;
                at("pointerdown", 300, 200);
                while (performance.now() - begun < 3000) {
                  await new Promise(requestAnimationFrame);
                  frames += 1;
                  if (frames % 2) at("pointermove", 300 + (frames % 100), 200 + (frames % 60));
                  else at("wheel", 400, 200, { deltaY: frames % 80 < 40 ? -14 : 14 });
                }
                at("pointerup", 300, 200);
                return frames / ((performance.now() - begun) / 1000);
            }""",
            plot.element_handle(),
        )
        trace = json.loads(browser.stop_tracing())
    frame_ms = _frame_ms(trace["traceEvents"])
    print(f"{frames:.1f} frames/s beside other tests, {frame_ms:.2f} ms of processor time a frame")
    assert frame_ms < 1000 / 50


def _frame_ms(events: list[dict[str, Any]]) -> float:
    """Processor time of the page's main thread over its animation frames, in milliseconds.

    All of the thread's tasks count, whatever they are for.
    """
    frames = [event for event in events if event["name"] == "FireAnimationFrame"]
    assert len(frames) > 10
    thread = frames[0]["pid"], frames[0]["tid"]
    tasks = [
        event.get("tdur", 0)
        for event in events
        if event["name"].endswith("RunTask") and (event["pid"], event["tid"]) == thread
    ]
    assert tasks
    return sum(tasks) / 1000 / len(frames)


def test_what_has_been_trained_is_compared_first(open_page: OpenPage) -> None:
    """Red before: the four newest policies were, which had no step yet, and a run had no curve."""
    new = [MadeRun(policy_id=f"new-{n}", num_steps=0, seed=3) for n in range(4)]
    with made_service(*new, RUN) as service:
        page = open_page(service.url)
        expect(page.get_by_label(f"Compare {RUN.policy_id}")).to_be_checked()
        expect(page.get_by_role("checkbox", checked=True)).to_have_count(4)
