"use strict";
// Data: {about, words, tokens}. A token: w word, lm / knn / mix probabilities, top [[word, p], ...], near [{c context
// words, w word, d distance, share, entry, store}, ...]. Words are numbers into `words`. Numbers that JSON does not know
// are the strings "inf", "-inf" and "nan". Text reaches the page only through textContent.
(() => {
  const holder = document.getElementById("data");
  const live = holder.dataset.live === "true";
  let data = JSON.parse(holder.textContent);
  let order = "text";
  let current = -1;
  const byId = (id) => document.getElementById(id);

  function element(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") node.className = value; else node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  }
  // Probabilities below those of float32 are 0 here, so a gain may be infinite, and of 0 and 0 there is none.
  const gain = (token) => token.mix === token.lm ? 0 : Math.log(token.mix / token.lm);
  const LARGEST_GAIN = 100; // nats that an infinite gain counts in a mean: about the range of float32
  const bounded = (g) => Math.max(-LARGEST_GAIN, Math.min(LARGEST_GAIN, g));
  const word = (number) => data.words[number];
  function decimal(value, format) {
    const number = { inf: Infinity, "-inf": -Infinity, nan: NaN }[value] ?? value;
    return Number.isFinite(number) ? format(number) : Number.isNaN(number) ? "nan" : number > 0 ? "inf" : "-inf";
  }
  const fixed = (value, digits) => decimal(value, (number) => number.toFixed(digits));
  const signed = (value, digits) => (value >= 0 ? "+" : "") + fixed(value, digits);
  const probability = (value) => decimal(value,
    (p) => p === 0 ? "0" : p >= 0.001 ? p.toFixed(p >= 0.1 ? 3 : 4) : p.toExponential(1));
  function tint(token) {
    const g = gain(token), size = Math.abs(g);
    const level = size >= 1.2 ? 3 : size >= 0.35 ? 2 : size >= 0.05 ? 1 : 0;
    return level ? `${g > 0 ? "helped" : "hurt"}-${level}` : "";
  }

  function tokenButton(number) {
    const token = data.tokens[number];
    const button = element("button", { type: "button", class: `token ${tint(token)}`, tabindex: "-1" }, word(token.w));
    button.dataset.number = number;
    const sign = gain(token) >= 0 ? "raised" : "lowered";
    button.setAttribute("aria-label", `${word(token.w)}, ${sign} from ${probability(token.lm)} to ${probability(token.mix)}`);
    return button;
  }

  function showTokens() {
    const box = byId("tokens");
    box.textContent = "";
    const numbers = data.tokens.map((_, number) => number);
    if (order === "text") {
      for (const number of numbers) box.append(tokenButton(number), word(data.tokens[number].w) === "\u23ce" ? element("br") : " ");
    } else {
      const sign = order === "helped" ? -1 : 1;
      const gains = data.tokens.map(gain); // compared and not subtracted: two infinite ones have no difference
      numbers.sort((a, b) => gains[a] < gains[b] ? -sign : gains[a] > gains[b] ? sign : 0);
      for (const number of numbers.slice(0, 200)) {
        const before = data.tokens.slice(Math.max(0, number - 12), number).map((token) => word(token.w)).join(" ");
        box.append(element("div", { class: "ranked" },
          element("span", { class: "before" }, element("bdi", {}, before)), tokenButton(number),
          element("span", { class: "gain" }, signed(gains[number], 2))));
      }
    }
    const first = box.querySelector(".token");
    if (first) first.tabIndex = 0;
  }

  function matching(context, number) {
    // Words of the context that stand among the last ones of the text too.
    const recent = new Set(data.tokens.slice(Math.max(0, number - 16), number).map((token) => token.w));
    return context.map((w) => recent.has(w));
  }

  function contextLine(context, number) {
    const line = element("span", { class: "context" });
    const marks = matching(context, number);
    context.forEach((w, place) => line.append(marks[place] ? element("mark", {}, word(w)) : word(w), " "));
    return line;
  }

  function showDetail(number) {
    if (number < 0 || number >= data.tokens.length) return;
    current = number;
    document.querySelectorAll('.token[aria-current="true"]').forEach((node) => node.removeAttribute("aria-current"));
    const button = document.querySelector(`.token[data-number="${number}"]`);
    if (button) button.setAttribute("aria-current", "true");
    const token = data.tokens[number];
    byId("detail-title").textContent = word(token.w);
    const body = byId("detail-body");
    body.textContent = "";
    const facts = element("dl");
    const weights = data.about.stores.map((store) => store.lambda).join(", ");
    for (const [name, value] of [["p LM", probability(token.lm)], ["p kNN", probability(token.knn)],
      ["p mixture", probability(token.mix)], ["lambda", weights || "0"], ["gain, nats", fixed(gain(token), 3)]]) {
      facts.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
    }
    body.append(facts, element("h3", {}, "Nearest training contexts"));
    if (token.near.length) {
      const table = element("table", {}, element("thead", {}, element("tr", {},
        ...["context", "next", "share", "distance"].map((name) => element("th", { scope: "col" }, name)))));
      const rows = element("tbody");
      for (const near of token.near) {
        const next = element("td", { class: near.w === token.w ? "hit" : "" }, word(near.w) + (near.w === token.w ? " \u2713" : ""));
        const place = data.about.stores.length > 1 ? `${data.about.stores[near.store].name} ` : "";
        const row = element("tr", { title: `${place}entry ${near.entry}` }, element("td", {}, contextLine(near.c, number)), next,
          element("td", { class: "number" }, `${(100 * near.share).toFixed(1)}%`),
          element("td", { class: "number" }, decimal(near.d, (d) => d.toPrecision(4))));
        rows.append(row);
      }
      table.append(rows);
      body.append(table);
    } else body.append(element("p", {}, "none"));
    body.append(element("h3", {}, "What the LM expected"));
    const expected = element("table", {}, element("tbody", {}, ...token.top.map(([w, p]) =>
      element("tr", {}, element("td", { class: w === token.w ? "hit" : "" }, word(w)), element("td", { class: "number" }, probability(p))))));
    body.append(expected);
  }

  function showSummary() {
    const box = byId("summary");
    box.textContent = "";
    const about = data.about;
    const facts = [["tokens", data.tokens.length.toLocaleString("en")], ["perplexity, LM", fixed(about.lm, 2)],
      ["perplexity, kNN-LM", fixed(about.mix, 2)], ["tokens helped", `${(100 * about.helped).toFixed(1)}%`]];
    for (const store of about.stores) {
      facts.push([store.name, `${store.entries.toLocaleString("en")} entries, k ${store.k}, lambda ${store.lambda}, T ${store.temperature}`]);
    }
    for (const [name, value] of facts) box.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  }

  function svg(name, attributes, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  function bars(title, labels, values, kinds) {
    const width = 340, height = 170, bottom = 30, left = 6;
    const most = Math.max(...values.map(Math.abs), 1e-9), least = Math.min(0, ...values), range = Math.max(...values, 0) - least || most;
    const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title });
    const y = (value) => 18 + (height - bottom - 18) * (1 - (value - least) / range);
    const step = (width - 2 * left) / values.length;
    values.forEach((value, place) => {
      const top = Math.min(y(value), y(0)), tall = Math.abs(y(value) - y(0));
      const bar = svg("rect", { x: left + place * step + 1, y: top, width: Math.max(1, step - 2), height: tall, class: kinds[place] });
      bar.append(svg("title", {}, `${labels[place]}: ${Number(value.toFixed(3))}`));
      chart.append(bar);
      if (place % Math.ceil(values.length / 8) === 0) {
        chart.append(svg("text", { x: left + (place + 0.5) * step, y: height - 14, "text-anchor": "middle" }, labels[place]));
      }
    });
    chart.append(svg("line", { x1: left, x2: width - left, y1: y(0), y2: y(0), class: "axis" }), svg("text", { x: left, y: 11 }, title));
    return chart;
  }

  function showPlots() {
    const box = byId("plots");
    box.textContent = "";
    if (!data.tokens.length) return;
    const edges = [-Infinity, -1, -0.5, -0.2, -0.05, 0.05, 0.2, 0.5, 1, 2, Infinity];
    const names = ["< -1", "-1", "-0.5", "-0.2", "0", "0.05", "0.2", "0.5", "1", "> 2"];
    const isIn = (g, place) => g >= edges[place] && (g < edges[place + 1] || g === Infinity && place === names.length - 1);
    const counts = names.map((_, place) => data.tokens.filter((t) => isIn(gain(t), place)).length);
    const kinds = names.map((_, place) => place < 4 ? "hurt" : place > 4 ? "helped" : "plain");
    box.append(bars("tokens by gain in nats", names, counts, kinds));
    const decades = [0, 1, 2, 3, 4, 5];
    const sums = decades.map((decade) => {
      const inside = data.tokens.filter((t) => !Number.isNaN(gain(t)) && Math.min(5, Math.floor(-Math.log10(t.lm))) === decade);
      return inside.length ? inside.reduce((sum, t) => sum + bounded(gain(t)), 0) / inside.length : 0;
    });
    const labels = decades.map((decade) => decade === 5 ? "<1e-5" : `1e-${decade}`);
    box.append(bars("mean gain by p LM (from, downwards)", labels, sums, sums.map((s) => s < 0 ? "hurt" : "helped")));
  }

  function show() {
    if (!data) return;
    showSummary(); showTokens(); showPlots();
    let best = 0;
    data.tokens.forEach((token, number) => { if (gain(token) > gain(data.tokens[best])) best = number; });
    showDetail(best);
  }

  const tokens = byId("tokens");
  const numberOf = (event) => { const node = event.target.closest(".token"); return node ? Number(node.dataset.number) : -1; };
  for (const kind of ["mouseover", "focusin", "click"]) tokens.addEventListener(kind, (event) => showDetail(numberOf(event)));
  tokens.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const all = [...tokens.querySelectorAll(".token")];
    const place = all.indexOf(document.activeElement);
    let next = event.key in steps ? place + steps[event.key] : event.key === "Home" ? 0 : event.key === "End" ? all.length - 1 : -1;
    if (place < 0 || !(next in all)) return;
    event.preventDefault();
    all[place].tabIndex = -1;
    all[next].tabIndex = 0;
    all[next].focus();
  });
  document.querySelectorAll("[data-order]").forEach((button) => button.addEventListener("click", () => {
    order = button.dataset.order;
    document.querySelectorAll("[data-order]").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    showTokens();
    showDetail(current);
  }));

  if (live) {
    byId("live").hidden = false;
    const status = byId("status");
    async function ask(path) {
      status.textContent = "working ...";
      for (const button of document.querySelectorAll("#live button")) button.disabled = true;
      try {
        const response = await fetch(path, {
          method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ text: byId("input").value }),
        });
        const answer = await response.json();
        if (answer.error) { status.textContent = answer.error; return; }
        if (answer.text !== undefined) byId("input").value = answer.text;
        data = answer.data;
        status.textContent = answer.note || "";
        show();
      } catch (error) {
        status.textContent = "the server does not answer";
      } finally {
        for (const button of document.querySelectorAll("#live button")) button.disabled = false;
      }
    }
    byId("live").addEventListener("submit", (event) => { event.preventDefault(); ask("/score"); });
    byId("continue").addEventListener("click", () => ask("/continue"));
  }
  show();
})();
