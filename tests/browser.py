"""The inspector's page in a real browser: ``make browser-test`` (needs Debian's chromium and chromium-driver).

Also takes the screenshots: ``python tests/browser.py --screenshots PAGE FOLDER``.
"""

import json
import sys
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

HOSTILE = "<script>window.hacked=1</script>"


def open_browser(dark: bool = False, width: int = 1280, height: int = 900) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},{height}"):
        options.add_argument(argument)
    if dark:
        options.add_argument("--force-dark-mode")
        options.add_argument("--blink-settings=preferredColorScheme=0")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))


def example(tokens: int) -> dict:
    """Data of a page, with hostile words in it."""
    words = ["the", "cat", HOSTILE, "\u23ce", "sat"]
    near = [
        {"c": [0, 1, 2], "w": number % 5, "d": 10.0 + number, "share": 0.5 / (number + 1), "entry": number, "store": 0}
        for number in range(8)
    ]
    return {
        "about": {
            "lm": 100.0, "mix": 90.0, "helped": 0.5,
            "stores": [{"name": HOSTILE, "entries": 9, "lambda": 0.25, "temperature": 1, "k": 8, "metric": "l2"}],
        },
        "words": words,
        "tokens": [
            {
                "w": number % 5, "lm": 0.1, "knn": 0.2, "mix": 0.1 * (0.2 + number * 3 / tokens),
                "top": [[0, 0.4], [2, 0.3]], "near": near,
            }
            for number in range(tokens)
        ],
    }  # fmt: skip


def check_page(folder: Path) -> None:
    from fairseq_knnlm.inspector.page import build_page

    path = folder.resolve() / "page.html"
    path.write_text(build_page(example(2000)))
    browser = open_browser()
    try:
        started = time.perf_counter()
        browser.get(path.as_uri())
        tokens = browser.find_elements(By.CSS_SELECTOR, "#tokens .token")
        print(f"2,000 tokens shown in {time.perf_counter() - started:.2f} s")
        assert len(tokens) == 2000
        # hovering shows the neighbours
        webdriver.ActionChains(browser).move_to_element(tokens[7]).perform()
        rows = browser.find_elements(By.CSS_SELECTOR, "#detail tbody tr")
        assert browser.find_element(By.ID, "detail-title").text == HOSTILE
        assert len(rows) == 8 + 2
        assert browser.find_elements(By.CSS_SELECTOR, "#detail mark")
        # the keyboard does too
        tokens[0].click()
        tokens[0].send_keys(Keys.ARROW_RIGHT)
        assert browser.find_element(By.ID, "detail-title").text == "cat"
        # sorting
        for order, first in (("helped", 1999), ("hurt", 0)):
            browser.find_element(By.CSS_SELECTOR, f"[data-order={order}]").click()
            assert browser.find_element(By.CSS_SELECTOR, "#tokens .token").get_attribute("data-number") == str(first)
        # text stays text
        assert browser.execute_script("return window.hacked") is None
        assert len(browser.find_elements(By.CSS_SELECTOR, "#plots svg")) == 2
        problems = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        assert not problems, json.dumps(problems)
    finally:
        browser.quit()
    phone = open_browser(width=500, height=900)
    try:
        phone.get(path.as_uri())
        page = "document.documentElement"
        wide = phone.execute_script(f"return {page}.scrollWidth - {page}.clientWidth")
        assert wide <= 0, f"the page is {wide} pixels too wide for a phone"
    finally:
        phone.quit()
    print("ok: page loads, hovering and keys show neighbours, sorting works, text stays text, fits a phone")


def take_screenshots(page: Path, folder: Path) -> None:
    for name, dark, order in (("inspector-light.png", False, "text"), ("inspector-dark.png", True, "helped")):
        browser = open_browser(dark)
        try:
            browser.get(page.resolve().as_uri())
            browser.find_element(By.CSS_SELECTOR, f"[data-order={order}]").click()
            browser.save_screenshot(str(folder / name))
            print(folder / name)
        finally:
            browser.quit()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--screenshots"]:
        take_screenshots(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        check_page(Path(sys.argv[1]))
