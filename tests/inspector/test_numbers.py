"""What the page computes by itself: colours, mixtures at other settings, shares."""

import math

import pytest
from pages import compute, needs_node

pytestmark = needs_node

STORE = {"name": "s", "entries": 900, "lambda": 0.25, "temperature": 4.0, "temperatures": [2.0, 4.0], "k": "all",
         "metric": "l2"}  # fmt: skip


def shades(price: float, *gains: float) -> list[str]:
    numbers = ", ".join("-Infinity" if gain == -math.inf else repr(gain) for gain in gains)
    written = "-Infinity" if price == -math.inf else repr(price)
    return compute(f"[{numbers}].map((gain) => shade(gain, {written}))")


def test_what_every_token_pays_has_no_colour():
    price = math.log(1 - 0.25)
    assert shades(price, price, price + 0.01, price / 2, 0.0, 0.049) == [""] * 5
    assert shades(price, 0.05, 0.34, 0.35, 1.2, 9.0) == [f"helped-{level}" for level in (1, 1, 2, 3, 3)]
    # no token of a mixture with constant weights falls below the price; were one to, it would have a colour
    assert shades(price, price - 0.06) == ["hurt-1"]


def test_a_careless_lambda_does_not_look_harmless():
    """With lambda 0.9 an untouched token loses nine tenths of its probability."""
    assert shades(math.log(0.1), math.log(0.1)) == ["hurt-3"]
    assert shades(math.log(0.1), math.log(0.55), math.log(0.45)) == ["", "hurt-1"]
    assert shades(-math.inf, -math.inf, 0.0, 0.5) == ["hurt-3", "", "helped-2"]
    assert shades(0.0, 0.0, -0.04) == ["", ""]


def test_the_price_is_that_of_all_datastores():
    assert compute("priceOf({lambdas: [0.2, 0.3]})") == pytest.approx(math.log(0.5))
    assert compute("[priceOf({lambdas: [0.3, 0.7]}) < -30, priceOf({lambdas: []})]") == [True, 0]


def test_mixtures_at_other_settings():
    token = {"lm": 0.1, "knn": 0.4, "mix": 0.175, "p": [[0.6, 0.4]]}
    data = {"token": token, "about": {"stores": [STORE]}}
    assert compute("settingsOf(data.about)", data) == {"lambdas": [0.25], "stops": [1]}
    scored = compute("probabilities(data.token, settingsOf(data.about), false)", data)
    assert scored == pytest.approx({"lm": 0.1, "knn": 0.4, "mix": 0.175})
    other = compute("probabilities(data.token, {lambdas: [0.5], stops: [0]}, false)", data)
    assert other == pytest.approx({"lm": 0.1, "knn": 0.6, "mix": 0.35})
    assert compute("probabilities(data.token, {lambdas: [0], stops: [0]}, false).mix", data) == 0.1
    assert compute("probabilities(data.token, {lambdas: [1], stops: [0]}, false).mix", data) == 0.6


def test_two_datastores():
    """p kNN is the mean by the weights, and a share is one of all p kNN together."""
    near = [{"w": 1, "d": 4.0, "share": 0.5, "store": 0}, {"w": 2, "d": 8.0, "share": 0.9, "store": 1}]
    token = {"w": 2, "lm": 0.1, "knn": 0.0, "mix": 0.0, "p": [[0.1, 0.2], [0.95, 0.9]], "near": near, "of": [5, 7],
             "z": [[0.0, math.log(math.exp(-4 / 4) / 0.5)], [0.0, math.log(math.exp(-8 / 4) / 0.9)]]}  # fmt: skip
    data = {"token": token, "about": {"stores": [STORE, STORE]}}
    found = compute("neighborsOf(data.token, data.about, {lambdas: [0.3, 0.1], stops: [1, 1]}, false, 8)", data)
    assert [near["store"] for near in found["shown"]] == [0, 1] and found["others"] == 10
    assert [near["share"] for near in found["shown"]] == pytest.approx([0.75 * 0.5, 0.25 * 0.9])
    assert found["rest"] == pytest.approx(1 - 0.375 - 0.225)
    assert found["restOnToken"] == pytest.approx(0.75 * 0.2 + 0.25 * 0.9 - 0.225)
    nothing = compute("neighborsOf(data.token, data.about, {lambdas: [0, 0], stops: [1, 1]}, false, 8)", data)
    assert nothing["rest"] == 0 and [near["share"] for near in nothing["shown"]] == [0, 0]


def test_an_entry_that_counts_for_several():
    """Its share at another temperature has its weight, which the temperature does not change."""
    near = [{"w": 1, "d": 4.0, "share": 0.5, "store": 0, "weight": 3.0}]
    token = {"w": 1, "lm": 0.1, "knn": 0.5, "mix": 0.2, "p": [[0.6, 0.5]], "near": near, "of": [5], "z": [[0.0, 0.5]]}
    data = {"token": token, "about": {"stores": [STORE]}}
    found = compute("neighborsOf(data.token, data.about, {lambdas: [0.3], stops: [1]}, false, 8)", data)
    assert found["shown"][0]["share"] == pytest.approx(3 * math.exp(-4 / 4 - 0.5))


def test_how_numbers_are_written():
    written = compute('[probability(0.25), probability(0.0123), probability(0.00066), probability(0), fixed("inf", 2),'
                      'signed(0.5, 2), signed(-0.5, 2), percent(0.123), short(12.34567), short(1e-5)]')  # fmt: skip
    assert written == ["0.250", "0.0123", "6.6e-4", "0", "inf", "+0.50", "-0.50", "12.3%", "12.35", "0.00001"]
