"""The inspector's page in a real browser: ``make browser-test`` (needs Debian's chromium and chromium-driver).

Also takes the screenshots: ``python tests/browser.py --screenshots PAGE SITE FOLDER``.
"""

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

HOSTILE = "<script>window.hacked=1</script>"
PHONE = {"width": 390, "height": 844, "pixelRatio": 1.75}
TEMPERATURES = [2.5, 5.0, 10.0, 20.0, 40.0]
ENTRIES = 20_000  # that took part, most of them far away
SHARES = [0.2, 0.1, 0.05, 0.02, 0.01, 4e-4, 3e-4, 2e-4]  # of the nearest, at the temperature 10


@contextmanager
def browser(dark: bool = False, phone: bool = False) -> Iterator[webdriver.Chrome]:
    """A browser without a window; after the ``with`` it must have had nothing to complain about."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(argument)
    if phone:
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": {**PHONE, "touch": True}})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield chrome
        problems = [entry for entry in chrome.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        assert not problems, json.dumps(problems)
        assert chrome.execute_script("return window.hacked") is None  # text stays text
    finally:
        chrome.quit()


def example(tokens: int, weight: float = 0.25, temperature: float = 10.0) -> dict:
    """Data of a page, with hostile words in it: two tokens in three are untouched, and every third one gains."""
    words = ["the", "cat", HOSTILE, "\u23ce", "sat"]
    distances = [-temperature * math.log(share) for share in SHARES]
    rest = 1 - sum(SHARES)
    masses = []
    for other in TEMPERATURES:  # as if all other entries had one distance
        far = -temperature * math.log(rest / (ENTRIES - len(SHARES)))
        masses.append(math.log(sum(math.exp(-d / other) for d in distances) + (ENTRIES - 8) * math.exp(-far / other)))
    own = TEMPERATURES.index(temperature)
    rows = []
    for number in range(tokens):
        w = number % 5
        near = [
            {"c": [0, 1, 2], "w": (w + 1 if number % 3 else w) if place else (w + 2) % 5, "d": d, "entry": place,
             "share": math.exp(-d / temperature - masses[own]), "store": 0}
            for place, d in enumerate(distances)
        ]  # fmt: skip
        for one in near:
            one["w"] %= 5
        hits = [one["d"] for one in near if one["w"] == w]
        p = [sum(math.exp(-d / other - mass) for d in hits) for other, mass in zip(TEMPERATURES, masses)]
        lm = 0.1 if number % 3 else 0.1 * (number + 1) / tokens
        rows.append({"w": w, "lm": lm, "knn": p[own], "mix": (1 - weight) * lm + weight * p[own], "near": near,
                     "top": [[0, 0.4], [2, 0.3]], "p": [p], "z": [masses], "of": [ENTRIES]})  # fmt: skip
    store = {"name": HOSTILE, "entries": 413_002, "lambda": weight, "temperature": temperature, "k": "all",
             "temperatures": TEMPERATURES, "metric": "l2", "index": "auto", "nprobe": 32}  # fmt: skip

    def perplexity(name: str) -> float:
        return math.exp(-sum(math.log(row[name]) for row in rows) / tokens)

    helped = sum(row["mix"] > row["lm"] for row in rows) / tokens
    source = {"checkpoint": f"{HOSTILE}.pt", "split": "test", "first": 100, "last": 99 + tokens, "total": 50_000}
    about = {"lm": perplexity("lm"), "mix": perplexity("mix"), "helped": helped, "stores": [store], "source": source}
    return {"about": about, "words": words, "tokens": rows}


class StandIn:
    """A server's model that knows one text, at whatever settings the page asks for."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def score(self, text: str, settings) -> dict:
        self.asked.append((text, settings.weights, settings.temperatures))
        return {"data": example(30, *(settings.weights or [0.25]), *(settings.temperatures or [10.0]))}

    def continue_(self, text: str, settings) -> dict:
        return {"text": f"{text} more", "note": "5 ms per token", **self.score(text, settings)}


# --- checks ---------------------------------------------------------------------------------------------------------


def css(chrome: webdriver.Chrome, selector: str) -> list:
    return chrome.find_elements(By.CSS_SELECTOR, selector)


def text_of(chrome: webdriver.Chrome, name: str) -> str:
    return chrome.find_element(By.ID, name).text


def slide(chrome: webdriver.Chrome, name: str, value: float) -> None:
    """Move a slider as a hand would, as far as the page can tell."""
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
    chrome.execute_script(script, chrome.find_element(By.ID, name), value)


def check_page(path: Path) -> None:
    with browser() as chrome:
        started = time.perf_counter()
        chrome.get(path.as_uri())
        tokens = css(chrome, "#tokens .token")
        print(f"2,000 tokens shown in {time.perf_counter() - started:.2f} s")
        assert len(tokens) == 2000
        check_header(chrome)
        check_details(chrome, tokens)
        check_sliders(chrome)
        check_orders(chrome)
        charts = css(chrome, "#plots svg")
        assert len(charts) == 2
        for chart, labels in zip(charts, (("in nats", "tokens"), ("p LM of the token", "mean gain in nats"))):
            shown = [text.text for text in chart.find_elements(By.TAG_NAME, "text")]
            assert all(any(label in text for text in shown) for label in labels), shown
    print("ok: header, colours, details by mouse and keyboard, sliders, orders, charts; text stays text")


def check_header(chrome: webdriver.Chrome) -> None:
    source = text_of(chrome, "source")
    assert "test split, tokens 100 to 2,099 of 50,000" in source and f"checkpoint {HOSTILE}.pt" in source
    summary = text_of(chrome, "summary")
    for part in ("413,002 entries", "k all", "index auto", "nprobe 32", "lambda 0.25", "temperature 10"):
        assert part in summary, summary
    # two tokens in three lose log(1 - lambda) exactly, and none of them has a colour
    assert len(css(chrome, "#tokens .token[class~='token']:not([class*='helped']):not([class*='hurt'])")) >= 1333
    assert not css(chrome, "#tokens [class*='hurt']") and css(chrome, "#tokens .helped-3")
    assert "-0.29 at most" in text_of(chrome, "balance")


def check_details(chrome: webdriver.Chrome, tokens: list) -> None:
    webdriver.ActionChains(chrome).move_to_element(tokens[7]).perform()
    assert text_of(chrome, "detail-title") == HOSTILE
    tokens[7].click()
    webdriver.ActionChains(chrome).move_to_element(tokens[5]).perform()
    assert text_of(chrome, "detail-title") == HOSTILE  # a click keeps it
    table = chrome.find_element(By.CSS_SELECTOR, "#detail table")
    shown = [row for row in table.find_elements(By.CSS_SELECTOR, "tbody tr") if row.is_displayed()]
    assert len(shown) == 5 + 1 + 1, [row.text for row in shown]  # shares, the line for the tiny ones, the rest
    assert not [row.text for row in shown[:5] if " 0.0%" in row.text]
    assert "the other 19,992 visited entries" in shown[-1].text and "61.9%" in shown[-1].text
    assert css(chrome, "#detail mark")
    more = chrome.find_element(By.CSS_SELECTOR, "#detail .more")
    assert more.get_attribute("aria-expanded") == "false" and "3 of the nearest" in more.text
    more.send_keys(Keys.ENTER)
    assert more.get_attribute("aria-expanded") == "true"
    assert len([row for row in table.find_elements(By.CSS_SELECTOR, "tbody tr") if row.is_displayed()]) == 5 + 1 + 3 + 1
    more.click()
    # the keyboard reaches every token
    tokens[0].click()
    tokens[0].send_keys(Keys.ARROW_RIGHT)
    assert text_of(chrome, "detail-title") == "cat"
    chrome.switch_to.active_element.send_keys(Keys.END)
    assert chrome.switch_to.active_element.get_attribute("data-number") == "1999"
    chrome.switch_to.active_element.send_keys(Keys.HOME, Keys.ESCAPE)
    webdriver.ActionChains(chrome).move_to_element(tokens[9]).perform()
    assert text_of(chrome, "detail-title") == "sat"


def check_sliders(chrome: webdriver.Chrome) -> None:
    """What the page computes is what example() says for these settings."""

    def perplexity() -> str:
        return css(chrome, "#summary dd")[2].text.split()[0]

    before = perplexity()
    slide(chrome, "lambda-0", 0.5)
    slide(chrome, "temperature-0", 3)
    rows = example(2000)["tokens"]
    expected = math.exp(-sum(math.log(0.5 * row["lm"] + 0.5 * row["p"][0][3]) for row in rows) / 2000)
    assert perplexity() == f"{expected:.2f}" != before
    assert "lambda 0.5, temperature 20" in text_of(chrome, "summary")
    slide(chrome, "lambda-0", 1)
    assert css(chrome, "#tokens .hurt-3")  # what no neighbour predicts has no probability left
    slide(chrome, "lambda-0", 0)
    assert not css(chrome, "#tokens [class*='helped']")
    css(chrome, "#knobs button")[0].click()
    assert perplexity() == before


def check_orders(chrome: webdriver.Chrome) -> None:
    data = example(2000)["tokens"]
    gains = [math.log(token["mix"] / token["lm"]) for token in data]
    for order, best in (("helped", max(gains)), ("hurt", min(gains))):
        chrome.find_element(By.CSS_SELECTOR, f"[data-order={order}]").click()
        first = int(css(chrome, "#tokens .token")[0].get_attribute("data-number"))
        assert round(gains[first], 2) == round(best, 2), order
    chrome.find_element(By.CSS_SELECTOR, "[data-order=text]").click()


def check_phone(path: Path) -> None:
    with browser(phone=True) as chrome:
        chrome.get(path.as_uri())
        page = "document.documentElement"
        wide = chrome.execute_script(f"return {page}.scrollWidth - {page}.clientWidth")
        assert wide <= 0, f"the page is {wide} pixels too wide for a phone"
        assert "Tap a word" in text_of(chrome, "detail-title") and not css(chrome, "#detail table")
        assert chrome.find_element(By.ID, "detail").size["height"] < 100
        css(chrome, "#tokens .token")[6].click()
        sheet, context, numbers = (css(chrome, name)[0] for name in ("#sheet", "#detail .where", "#detail .number"))
        assert context.is_displayed() and sheet.get_attribute("aria-expanded") == "true"
        assert context.location["y"] < numbers.location["y"] < css(chrome, "#detail dl")[0].location["y"]
        wide = chrome.execute_script(f"return {page}.scrollWidth - {page}.clientWidth")
        assert wide <= 0, f"the sheet makes the page {wide} pixels too wide for a phone"
        sheet.click()
        assert not context.is_displayed()
    print("ok: fits a phone, the sheet starts closed, a tap opens it, the context stands above the numbers")


def check_live() -> None:
    from fairseq_knnlm.inspector.server import make_server

    model = StandIn()
    server = make_server(model, "127.0.0.1", 0, examples=["w1 w2", "w3"])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with browser() as chrome:
            chrome.get(f"http://127.0.0.1:{server.server_address[1]}")
            assert not [card for card in css(chrome, "main > section") if card.is_displayed()]  # no empty cards

            def wait_for(requests: int) -> None:
                is_done = lambda _: len(model.asked) == requests and "working" not in text_of(chrome, "status")  # noqa: E731
                WebDriverWait(chrome, 10).until(is_done)

            chrome.find_element(By.ID, "example").click()
            wait_for(1)
            assert model.asked[-1] == ("w1 w2", None, None) and len(css(chrome, "#tokens .token")) == 30
            slide(chrome, "lambda-0", 0.5)  # which needs no server
            slide(chrome, "temperature-0", 3)
            chrome.find_element(By.ID, "continue").click()
            wait_for(2)
            assert model.asked[-1] == ("w1 w2", [0.5], [20.0])
            assert chrome.find_element(By.ID, "input").get_attribute("value") == "w1 w2 more"
            value = css(chrome, "#knobs input[type=number]")[1]
            value.clear()
            value.send_keys("2.5", Keys.TAB)  # one of the stops
            time.sleep(0.2)
            assert len(model.asked) == 2 and "temperature 2.5" in text_of(chrome, "summary")
            chrome.find_element(By.ID, "example").click()
            wait_for(3)
            assert model.asked[-1] == ("w3", [0.5], [2.5])
    finally:
        server.shutdown()
        server.server_close()
    print("ok: the live page begins empty, has examples, and asks with the settings of its sliders")


def check(folder: Path) -> None:
    from fairseq_knnlm.inspector.page import build_page

    path = folder.resolve() / "page.html"
    path.write_text(build_page(example(2000)))
    check_page(path)
    check_phone(path)
    check_live()


# --- pictures -------------------------------------------------------------------------------------------------------


def take_screenshots_of_site(site: Path, folder: Path) -> None:
    """The docs on a desk and on a phone, light and dark."""
    for name, page, phone, dark in (
        ("site-light", "index.html", False, False),
        ("site-dark", "tutorial.html", False, True),
        ("site-phone-light", "tutorial.html", True, False),
        ("site-phone-dark", "index.html", True, True),
    ):
        with browser(dark, phone) as chrome:
            chrome.get((site / page).resolve().as_uri())
            assert "fairseq-knnlm" in chrome.title, chrome.title
            width = chrome.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
            assert width <= 0, f"{page} is {width} pixels wider than the screen"
            chrome.save_screenshot(str(folder / f"{name}.png"))
        print(f"{folder / name}.png")


def take_screenshots(page: Path, folder: Path) -> None:
    """The page on a desk and on a phone, light and dark; the dark ones after one more step of a visitor."""
    for name, phone in (("inspector", False), ("inspector-phone", True)):
        for dark in (False, True):
            path = folder / f"{name}-{'dark' if dark else 'light'}.png"
            with browser(dark, phone) as chrome:
                chrome.get(page.resolve().as_uri())
                if phone and dark:  # the light one shows the sheet closed
                    chrome.execute_script("document.getElementById('tokens').scrollIntoView()")
                    helped = css(chrome, "#tokens .helped-3") or css(chrome, "#tokens .token")
                    next((token for token in helped if len(token.text) > 3), helped[0]).click()  # a word
                elif dark:
                    chrome.find_element(By.CSS_SELECTOR, "[data-order=helped]").click()
                chrome.save_screenshot(str(path))
            print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq and selenium tell everything otherwise
    if sys.argv[1:2] == ["--screenshots"]:
        take_screenshots(Path(sys.argv[2]), Path(sys.argv[4]))
        take_screenshots_of_site(Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        check(Path(sys.argv[1]))
