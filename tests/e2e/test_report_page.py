"""Pages in a real headless Chromium: they render, say nothing on the console, and show the figures of the JSON."""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from perfmodel.cli.predict import predict
from perfmodel.units import format_time

_spec = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
browser = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser)


def run_predict(folder, *arguments):
    page = folder / "report.html"
    done = CliRunner().invoke(predict, [*arguments, "--json", "--html", str(page)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return page, json.loads(done.stdout)


@pytest.fixture(scope="module")
def dlrm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    return run_predict(folder, "--model", "dlrm_small", "--topo", "dgx")


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with browser.open_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(session, dlrm):
    session.get(dlrm[0].as_uri())
    return session


def value(session, css):
    return float(session.find_element("css selector", css).get_attribute("data-value"))


def test_the_page_loads_nothing_and_says_nothing(page, dlrm):
    assert page.get_log("browser") == []
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    text = dlrm[0].read_text()
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "src=" not in text


def test_the_figures_are_those_of_the_json(page, dlrm):
    answer = dlrm[1]
    assert json.loads(page.find_element("id", "prediction").get_attribute("textContent")) == answer
    for css, key in (("#iteration", "iteration_time_s"), ("#low", "low_s"), ("#high", "high_s")):
        assert value(page, css) == answer[key]
        assert page.find_element("css selector", css).text == format_time(answer[key])
    assert value(page, '[data-fact="samples per second"]') == answer["samples_per_s"]
    assert value(page, '[data-fact="largest memory of a rank"]') == answer["memory_bytes"]
    rows = page.find_elements("css selector", "#breakdown table:first-of-type tbody tr")[: len(answer["ranks"])]
    keys = ("compute_s", "exposed_communication_s", "exposed_copy_s", "wait_s", "host_bound_s", "idle_s")
    for row, rank in zip(rows, answer["ranks"], strict=True):
        cells = [float(cell.get_attribute("data-value")) for cell in row.find_elements("css selector", "[data-value]")]
        assert cells[:6] == [rank["breakdown"][key] for key in keys]


def test_the_timeline_spans_add_up_to_the_breakdown(page, dlrm):
    spans = json.loads(page.find_element("id", "spans").get_attribute("textContent"))[0]
    compute = next(s["id"] for s in spans["streams"] if s["name"] == "compute")
    busy_ps = sum(t for t, s in zip(spans["length"], spans["stream"], strict=True) if s == compute)
    assert busy_ps == pytest.approx(dlrm[1]["ranks"][0]["breakdown"]["compute_s"] * 1e12, rel=1e-9)


def test_the_timeline_draws_zooms_and_steps_from_the_keyboard(page):
    canvas = page.find_element("id", "canvas")
    page.execute_script("arguments[0].scrollIntoView(); arguments[0].focus()", canvas)

    def state():
        page.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))")
        return {key: int(canvas.get_attribute(f"data-{key}")) for key in ("drawn", "from", "to")}

    whole = state()
    assert whole["drawn"] > 20
    canvas.send_keys("+")
    zoomed = state()
    assert zoomed["to"] - zoomed["from"] == pytest.approx(0.6 * (whole["to"] - whole["from"]), rel=0.02)
    canvas.send_keys("n")
    state()
    assert "on the critical path" in page.find_element("id", "told").text
    canvas.send_keys("0")
    assert state() == whole
    painted = page.execute_script(
        "const c = arguments[0], d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const seen = new Set();"
        "for (let i = 0; i < d.length; i += 4) seen.add(d[i] + ',' + d[i + 1] + ',' + d[i + 2]); return seen.size",
        canvas,
    )
    assert painted > 4
    assert page.get_log("browser") == []


def test_a_phone_shows_it_without_scrolling_sideways(session, dlrm):
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    session.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        session.get(dlrm[0].as_uri())
        assert session.execute_script("return document.documentElement.scrollWidth") <= 390
    finally:
        session.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_it_prints(page):
    import base64

    pdf = base64.b64decode(page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF")
    assert 2 <= pdf.count(b"/Type /Page\n") <= 20


def test_names_are_text_not_markup(session, tmp_path):
    model = Path(__file__).parents[2] / "configs" / "models" / "dlrm_small.yaml"
    odd = "<script>document.title='broken'</script>"
    named = tmp_path / "odd.yaml"
    lines = [line for line in model.read_text().splitlines() if not line.startswith("name:")]
    named.write_text("\n".join([f'name: "{odd}"', *lines]))
    page, _ = run_predict(tmp_path, "--model", str(named), "--topo", "dgx")
    session.get(page.as_uri())
    assert odd in session.find_element("tag name", "h1").text
    assert session.title != "broken"
    assert session.get_log("browser") == []
