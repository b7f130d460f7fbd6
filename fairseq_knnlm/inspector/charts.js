// The two charts, drawn as SVG. A bin lies between two edges, and the edges are what is labelled.

function svg(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Round numbers from `least` to `most`, at most six.
function ticks(least, most) {
  const raw = (most - least) / 4 || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= raw) ?? 10);
  const first = Math.ceil(least / step - 1e-9);
  return Array.from({ length: Math.floor(most / step + 1e-9) - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(6)));
}

function barChart({ title, xLabel, yLabel, edges, values, kinds, notes }) {
  const width = 335, height = 230, left = 50, right = 14, top = 30, bottom = 48;
  const least = Math.min(0, ...values), most = Math.max(0, ...values, least + 1e-9);
  const y = (value) => top + (height - top - bottom) * (most - value) / (most - least);
  const step = (width - left - right) / values.length, x = (place) => left + place * step;
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${title}: ${notes.join("; ")}` });
  chart.append(svg("text", { x: left, y: 16, class: "title" }, title));
  for (const tick of ticks(least, most)) {
    chart.append(svg("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: "grid" }),
      svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  values.forEach((value, place) => {
    const bar = svg("rect", {
      x: x(place) + 1, y: Math.min(y(value), y(0)), width: Math.max(1, step - 2), height: Math.abs(y(value) - y(0)), class: kinds[place],
    });
    bar.append(svg("title", {}, notes[place]));
    chart.append(bar);
  });
  edges.forEach((edge, place) => chart.append(svg("text", { x: x(place), y: height - bottom + 16, "text-anchor": "middle" }, edge)));
  chart.append(svg("line", { x1: left, x2: width - right, y1: y(0), y2: y(0), class: "axis" }),
    svg("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, xLabel),
    svg("text", { x: 12, y: (top + height - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(top + height - bottom) / 2})` }, yLabel));
  return chart;
}

// How many tokens gain how much. The first bin is what no neighbour predicted: it pays the price of mixing.
function gainChart(gains, price) {
  const known = gains.filter((gain) => !Number.isNaN(gain));
  const low = Math.max(price, -9.99), untouched = Math.min(low + MARGIN, -MARGIN / 2);
  const inner = [untouched, MARGIN, 0.2, 0.5, 1, 2, 4].filter((edge, place) => place === 0 || edge > untouched);
  const bounds = [-Infinity, ...inner, Infinity];
  const counts = bounds.slice(1).map((to, place) => known.filter((g) => g >= bounds[place] && (g < to || to === Infinity)).length);
  const least = Math.max(-9.99, Math.min(low, ...known));
  const edges = [fixed(least, 2), ...inner.map((edge) => short(Number(edge.toFixed(2)))), "\u221e"];
  const kinds = bounds.slice(1).map((to, place) => {
    const middle = place === 0 ? least : to === Infinity ? 9 : (bounds[place] + to) / 2;
    return shade(middle, price).split("-")[0] || "plain";
  });
  const notes = counts.map((count, place) => `${edges[place]} to ${edges[place + 1]} nats: ${whole(count)} tokens`);
  return barChart({ title: "How much tokens gain", xLabel: "gain: log p mixture \u2212 log p LM, in nats", yLabel: "tokens", edges, values: counts, kinds, notes });
}

// Whether retrieval helps where the LM was sure or unsure.
function certaintyChart(tokens) {
  const edges = ["1", "0.1", "0.01", "1e-3", "1e-4", "1e-5", "0"];
  const groups = edges.slice(1).map(() => []);
  for (const { lm, gain } of tokens) {
    if (!Number.isNaN(gain)) groups[Math.max(0, Math.min(5, Math.floor(-Math.log10(lm))))].push(bounded(gain));
  }
  const values = groups.map((group) => group.length ? sum(group) / group.length : 0);
  const notes = groups.map((group, place) => `p LM ${edges[place]} to ${edges[place + 1]}: ${whole(group.length)} tokens, mean gain ${fixed(values[place], 3)} nats`);
  const kinds = values.map((value) => value < 0 ? "hurt" : "helped");
  return barChart({ title: "Where the LM was sure, and where not", xLabel: "p LM of the token", yLabel: "mean gain in nats", edges, values, kinds, notes });
}
