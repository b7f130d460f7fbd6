// The page itself: header, text, details of a token, charts. Text reaches the page only through textContent.

const byId = (id) => document.getElementById(id);
const live = byId("data").dataset.live === "true";
const MOST_NEIGHBORS = 8, RANKED = 200;
const isPhone = () => typeof matchMedia === "function" && matchMedia("(max-width: 56rem)").matches;

let data = JSON.parse(byId("data").textContent);
let settings = { lambdas: [], stops: [] };
let asScored = true; // whether the settings are those that the text was scored with
let values = []; // of each token at the settings: lm, knn, mix, gain
let order = "text", current = -1, showsTiny = false;
let isKept = false; // whether a token was clicked or walked to, so that pointing at others on the way changes nothing

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value; else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
function facts(box, pairs) {
  box.textContent = "";
  for (const [name, value] of pairs) box.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  return box;
}
const word = (number) => data.words[number];

// SPALM has no mixture of probabilities: its gate mixes the network's own state with the retrieved tokens.
const isSpalm = () => data.about.kind === "spalm";
const names = () => isSpalm()
  ? { lm: "without neighbours", mix: "SPALM", knn: "share of the token among them", weight: "from the neighbours (1 \u2212 gate)" }
  : { lm: "LM", mix: "kNN-LM", knn: "p kNN", weight: "lambda" };

// --- header ----------------------------------------------------------------------------------------------------------

function showSource() {
  const source = data.about.source ?? {}, parts = [];
  if (source.split) parts.push(`${source.split} split, tokens ${whole(source.first)} to ${whole(source.last)} of ${whole(source.total)}`);
  if (source.checkpoint) parts.push(`checkpoint ${source.checkpoint}`);
  byId("source").textContent = parts.join(" \u00b7 ");
}

// With a gate each token has weights of its own, until a slider is moved.
const hasGate = () => asScored && data.tokens.some((token) => token.g);
const meanLambda = (number) => sum(data.tokens.map((token) => token.g[number])) / data.tokens.length;
const lambdaText = (number) => hasGate() ? `lambda by the gate, ${short(meanLambda(number))} on average` : `lambda ${short(settings.lambdas[number])}`;
const tokenPrice = (number) => priceOf({ lambdas: lambdasOf(data.tokens[number], settings, asScored) });
const largestPrice = () => hasGate() ? Math.min(...data.tokens.map((_, number) => tokenPrice(number))) : priceOf(settings);

function showSummary() {
  const about = data.about, gains = values.map((value) => value.gain);
  if (isSpalm()) document.title = document.querySelector("h1").textContent = "What SPALM retrieved";
  const lm = real(about.lm), mix = asScored ? real(about.mix) : perplexityOf(values.map((value) => value.mix));
  const change = Number.isFinite(mix / lm) ? ` (${signed(100 * (mix / lm - 1), 1)}%)` : "";
  const helped = gains.filter((gain) => gain > 0).length / gains.length;
  facts(byId("summary"), [
    ["tokens", whole(data.tokens.length)], [`perplexity, ${names().lm}`, fixed(lm, 2)], [`perplexity, ${names().mix}`, fixed(mix, 2) + change],
    ["tokens helped", percent(helped)],
    ...about.stores.map((store, number) => [store.name, [
      ...(store.rows ? [`head (${store.kind})`, `${whole(store.rows)} rows`] : [`${whole(store.entries)} entries`, `k ${store.k}`]),
      ...(store.index ? [`index ${store.index}`] : []),
      ...(store.nprobe && store.index !== "flat" ? [`nprobe ${store.nprobe}`] : []), ...(store.far ? [`far ${store.far}`] : []),
      ...(isSpalm() ? [`${names().weight} ${short(meanLambda(number))} on average`]
        : [lambdaText(number), `temperature ${short(temperatureAt(store, settings.stops[number]))}`]),
    ].join(", ")]),
  ]);
  const known = gains.filter((gain) => !Number.isNaN(gain)).map(bounded);
  const up = known.filter((gain) => gain > 0), down = known.filter((gain) => gain <= 0);
  const mean = (some) => signed(some.length ? sum(some) / some.length : 0, 2);
  byId("balance").textContent = isSpalm() ? `${percent(up.length / known.length)} of the tokens gain by their neighbours, ${mean(up)} `
    + `nats on average, and the others lose ${mean(down)}. Together: ${mean(known)} nats per token.` : `${percent(up.length / known.length)} of the tokens gain, ${mean(up)} nats on average. The others pay `
    + `for the mixture, ${mean(down)} on average and ${fixed(largestPrice(), 2)} at most, which is log(1 \u2212 lambda). `
    + `Together: ${mean(known)} nats per token.`;
}

function showLegend() {
  const price = largestPrice(), legend = byId("legend");
  const swatch = (kind, text) => element("span", { class: "key" }, element("span", { class: `swatch ${kind}` }), text);
  legend.textContent = "";
  legend.append("Raised by ", swatch("helped-1", `${MARGIN}`), swatch("helped-2", `${LEVELS[0]}`), swatch("helped-3", `${LEVELS[1]} nats or more.`));
  if (values.some(({ gain }) => gain < neutralFrom(price))) legend.append(swatch("hurt-2", "lowered to less than half."));
  legend.append(swatch("none", `No colour: it pays at most the price of mixing (${fixed(price, 2)}).`));
}

// --- text ------------------------------------------------------------------------------------------------------------

function tokenButton(number) {
  const token = data.tokens[number], { lm, mix, gain } = values[number];
  const kind = shade(gain, tokenPrice(number));
  const button = element("button", { type: "button", class: `token ${kind}`, tabindex: "-1" }, word(token.w));
  button.dataset.number = number;
  const change = gain > 0 ? "raised" : gain < 0 ? "lowered" : "unchanged";
  button.setAttribute("aria-label", `${word(token.w)}, ${change} from ${probability(lm)} to ${probability(mix)}`);
  if (number === current) button.setAttribute("aria-current", "true");
  return button;
}

// By gain to the two digits that are shown; of those that pay the same, who lost more probability comes first.
function ranking(sign) {
  const key = values.map(({ gain }) => Number.isFinite(gain) ? Math.round(100 * gain) : gain);
  const lost = values.map(({ lm, mix }) => lm - mix);
  const compare = (a, b) => a < b ? -1 : a > b ? 1 : 0; // not subtracted: two infinite ones have no difference
  return values.map((_, number) => number).sort((a, b) => sign * compare(key[a], key[b]) || sign * compare(lost[b], lost[a]));
}

function showTokens() {
  const box = byId("tokens");
  box.textContent = "";
  if (order === "text") {
    data.tokens.forEach((token, number) => box.append(tokenButton(number), word(token.w) === "\u23ce" ? element("br") : " "));
  } else {
    for (const number of ranking(order === "helped" ? -1 : 1).slice(0, RANKED)) {
      const before = data.tokens.slice(Math.max(0, number - 12), number).map((token) => word(token.w)).join(" ");
      box.append(element("div", { class: "ranked" },
        element("span", { class: "before" }, element("bdi", {}, before)), tokenButton(number),
        element("span", { class: "gain" }, signed(values[number].gain, 2))));
    }
  }
  const first = box.querySelector('.token[aria-current="true"]') ?? box.querySelector(".token");
  if (first) first.tabIndex = 0;
}

// --- details of a token ----------------------------------------------------------------------------------------------

function contextLine(context, number) {
  // Words that stand among the last ones of the text, too, are marked.
  const recent = new Set(data.tokens.slice(Math.max(0, number - 16), number).map((token) => token.w));
  const line = element("span", { class: "context" });
  for (const w of context) line.append(recent.has(w) ? element("mark", {}, word(w)) : word(w), " ");
  return line;
}

function neighborRow(near, number) {
  const isHit = near.w === data.tokens[number].w, stores = data.about.stores;
  const place = stores.length > 1 ? `${stores[near.store].name} ` : "";
  const counts = near.weight === undefined ? "" : `, which counts ${decimal(near.weight, (w) => w.toPrecision(3))} times`;
  return element("tr", { title: `${place}entry ${near.entry}${counts}` },
    element("td", { class: "where" }, contextLine(near.c, number)),
    element("td", { class: isHit ? "next hit" : "next" }, word(near.w) + (near.weight === undefined ? "" : ` \u00d7${decimal(near.weight, (w) => w.toPrecision(3))}`) + (isHit ? " \u2713" : "")),
    element("td", { class: "number", "data-label": "share" }, percent(near.share)),
    element("td", { class: "number", "data-label": "distance" }, decimal(near.d, (d) => Math.abs(d) < 1 ? d.toFixed(3) : d.toPrecision(4))));
}

function neighborTable(number) {
  const { shown, rest, restOnToken, others } = neighborsOf(data.tokens[number], data.about, settings, asScored, MOST_NEIGHBORS);
  const large = shown.filter((near) => near.share >= TINY), tiny = shown.filter((near) => near.share < TINY);
  const rows = (some) => some.map((near) => neighborRow(near, number));
  const table = element("table", {}, element("thead", {}, element("tr", {},
    ...["context", "next", "share", "distance"].map((name) => element("th", { scope: "col" }, name)))), element("tbody", {}, ...rows(large)));
  if (tiny.length) {
    const more = element("tbody", {}, ...rows(tiny));
    const button = element("button", { type: "button", class: "more" });
    const update = () => {
      more.hidden = !showsTiny;
      button.setAttribute("aria-expanded", String(showsTiny));
      button.textContent = `${showsTiny ? "\u25be" : "\u25b8"} ${tiny.length} of the nearest with less than 0.05% each`;
    };
    button.addEventListener("click", () => { showsTiny = !showsTiny; update(); });
    update();
    table.append(element("tbody", {}, element("tr", { class: "tiny" }, element("td", { colspan: "4" }, button))), more);
  }
  if (others > 0 || rest >= TINY) {
    const what = data.about.stores.some((store) => store.k === "all") ? "visited entries" : "neighbours";
    const far = data.about.stores.some((store) => store.far) ? " and the far lists" : "";
    const heads = data.about.stores.some((store) => store.rows) ? " and the heads" : "";
    const name = others === null ? "all other entries" : others > 0 ? `the other ${whole(others)} ${what}${far}${heads}` : heads ? `what the heads say` : `no other ${what}`;
    table.append(element("tbody", {}, element("tr", { class: "rest" },
      element("td", { class: "where" }, name + (restOnToken < TINY ? "" : ` (${percent(restOnToken)} on this token)`)), element("td", { class: "next" }),
      element("td", { class: "number", "data-label": "share" }, percent(rest)), element("td", { class: "number" }))));
  }
  return table;
}

function showDetail(number) {
  if (number < 0 || number >= data.tokens.length) return;
  current = number;
  document.querySelectorAll('.token[aria-current="true"]').forEach((node) => node.removeAttribute("aria-current"));
  const button = document.querySelector(`.token[data-number="${number}"]`);
  if (button) button.setAttribute("aria-current", "true");
  const token = data.tokens[number], { lm, knn, mix, gain } = values[number];
  byId("detail-title").textContent = word(token.w);
  const body = byId("detail-body");
  body.textContent = "";
  body.append(element("p", { class: "change" }, `p ${probability(lm)} \u2192 ${probability(mix)}`),
    element("h3", {}, "Nearest training contexts"), token.near.length ? neighborTable(number) : element("p", {}, "none"),
    element("h3", {}, "Probabilities"), facts(element("dl"), [[`p ${names().lm}`, probability(lm)], [names().knn, probability(knn)],
      [isSpalm() ? "p SPALM" : "p mixture", probability(mix)], [names().weight, lambdasOf(token, settings, asScored).map(short).join(", ") || "0"], ["gain, nats", fixed(gain, 3)]]),
    element("h3", {}, isSpalm() ? "What SPALM expected" : "What the LM expected"), element("table", { class: "expected" }, element("tbody", {}, ...token.top.map(([w, p]) =>
      element("tr", {}, element("td", { class: w === token.w ? "hit" : "" }, word(w)), element("td", { class: "number" }, probability(p)))))));
  byId("sheet").hidden = false;
}

// On a phone the details are a sheet at the bottom, which starts closed.
function openSheet(isOpen) {
  byId("detail").dataset.open = String(isOpen);
  byId("sheet").textContent = isOpen ? "close" : "open";
  byId("sheet").setAttribute("aria-expanded", String(isOpen));
}

// --- all of it -------------------------------------------------------------------------------------------------------

function showPlots() {
  const box = byId("plots");
  box.textContent = "";
  if (values.length) box.append(gainChart(values.map(({ gain }) => gain), largestPrice()), certaintyChart(values));
}

// Everything that depends on the settings.
function refresh() {
  values = data.tokens.map((token) => {
    const all = probabilities(token, settings, asScored);
    return { ...all, gain: gainOf(all) };
  });
  showSummary(); showLegend(); showTokens(); showPlots(); showDetail(current);
}

// A text that was scored: with the settings that it was scored with.
function show() {
  if (!data) return;
  byId("results").hidden = false;
  settings = settingsOf(data.about);
  asScored = true;
  current = -1;
  isKept = false;
  showSource(); refresh(); showKnobs();
  openSheet(false);
  if (isPhone()) {
    byId("detail-title").textContent = "Tap a word to see its neighbours";
    byId("detail-body").textContent = "";
    byId("sheet").hidden = true;
    return;
  }
  let best = 0;
  values.forEach(({ gain }, number) => { if (gain > values[best].gain) best = number; });
  showDetail(best);
}

const tokens = byId("tokens");
const numberOf = (event) => { const node = event.target.closest(".token"); return node ? Number(node.dataset.number) : -1; };
tokens.addEventListener("mouseover", (event) => { if (!isKept && !isPhone()) showDetail(numberOf(event)); });
for (const kind of ["focusin", "click"]) {
  tokens.addEventListener(kind, (event) => {
    const number = numberOf(event);
    isKept = number >= 0; // a click between the tokens lets go
    if (!isKept) return;
    showDetail(number);
    openSheet(true);
  });
}
tokens.addEventListener("keydown", (event) => {
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const all = [...tokens.querySelectorAll(".token")];
  const place = all.indexOf(document.activeElement);
  const next = event.key in steps ? place + steps[event.key] : event.key === "Home" ? 0 : event.key === "End" ? all.length - 1 : -1;
  if (place < 0 || !(next in all)) return;
  event.preventDefault();
  for (const node of all) node.tabIndex = -1;
  all[next].tabIndex = 0;
  all[next].focus();
});
byId("sheet").addEventListener("click", () => openSheet(byId("detail").dataset.open !== "true"));
document.addEventListener?.("keydown", (event) => { if (event.key === "Escape") { isKept = false; openSheet(false); } });
document.querySelectorAll("[data-order]").forEach((button) => button.addEventListener("click", () => {
  order = button.dataset.order;
  document.querySelectorAll("[data-order]").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
  showTokens();
}));
