// What the page computes: mixtures at other settings, shares, colours, and how numbers are written. No document here.
//
// Data: {about, words, tokens}. A token: w word, lm / knn / mix probabilities as scored, top [[word, p], ...], near [{c
// context words, w word, d distance, share, entry, store, weight (if not 1)}, ...]; for each datastore p [p_kNN at each temperature],
// z [log of the mass of all entries at each temperature], of (how many entries took part), and with a gate g [its weight
// for this token]. Words are numbers into `words`. A head is a datastore without entries, with `rows` and one temperature.
// about.stores has each datastore's lambda, temperature and `temperatures`. Numbers that JSON does not know are
// the strings "inf", "-inf" and "nan".
//
// about.kind is "spalm" for a SPALM, see spalm_collect.py; it has no p, z, of and temperatures.
//
// Settings: {lambdas: [one per datastore], stops: [place in its `temperatures`]}.

const real = (value) => ({ inf: Infinity, "-inf": -Infinity, nan: NaN })[value] ?? value;

function settingsOf(about) {
  return {
    lambdas: about.stores.map((store) => store.lambda),
    stops: about.stores.map((store) => Math.max(0, (store.temperatures ?? []).indexOf(store.temperature))),
  };
}
const temperatureAt = (store, stop) => (store.temperatures ?? [store.temperature])[stop];
const sum = (values) => values.reduce((total, value) => total + value, 0);

// The weights of the datastores for a token: with a gate, and as scored, its own.
const lambdasOf = (token, settings, asScored) => asScored && token.g ? token.g : settings.lambdas;

// Probabilities of a token at some settings. At those that it was scored with they are the scored ones.
function probabilities(token, settings, asScored) {
  if (asScored) return { lm: token.lm, knn: token.knn, mix: token.mix };
  const all = sum(settings.lambdas);
  const knn = settings.lambdas.map((lambda, store) => lambda * (token.p ? token.p[store][settings.stops[store]] : token.knn));
  const total = sum(knn);
  // 1 - 0.3 - 0.7 is not quite 0
  return { lm: token.lm, knn: all > 0 ? total / all : 0, mix: Math.max(0, 1 - all) * token.lm + total };
}

// Probabilities below those of floating point are 0 here, so a gain may be infinite, and of 0 and 0 there is none.
const gainOf = ({ lm, mix }) => mix === lm ? 0 : Math.log(mix / lm);
const LARGEST_GAIN = 100; // nats that an infinite gain counts in a mean: about the range of float32
const bounded = (gain) => Math.max(-LARGEST_GAIN, Math.min(LARGEST_GAIN, gain));

function perplexityOf(values) {
  return Math.exp(-sum(values.map((p) => Math.log(p))) / values.length);
}

// What a token pays for the mixture if no neighbour predicts it: log(1 - sum of lambdas), in nats. No token pays more.
const priceOf = (settings) => Math.log(Math.max(0, 1 - sum(settings.lambdas)));

// The colour of a gain. Whatever lies between the price of mixing and 0 has none: that is what an unlucky token pays at
// any rate, and says nothing about what was retrieved. A price above a half of the probability counts as a half, so
// that a careless lambda looks as bad as it is.
const MARGIN = 0.05, LEVELS = [0.35, 1.2];
const neutralFrom = (price) => Math.max(price, -Math.LN2) - MARGIN;
function shade(gain, price) {
  const level = (size) => 1 + LEVELS.filter((edge) => size >= edge).length;
  if (gain >= MARGIN) return `helped-${level(gain)}`;
  if (gain < neutralFrom(price)) return `hurt-${level(neutralFrom(price) + MARGIN - gain)}`;
  return "";
}

// The neighbours of a token with their shares of the p_kNN of all datastores together, largest first; and the share of
// all other entries, with the part of it that lies on the token itself.
function neighborsOf(token, about, settings, asScored, most) {
  const lambdas = lambdasOf(token, settings, asScored);
  const all = sum(lambdas), knn = probabilities(token, settings, asScored).knn;
  const near = token.near.map((one) => {
    const store = about.stores[one.store], stop = settings.stops[one.store];
    const scale = (store.metric === "ip" ? 1 : -1) / temperatureAt(store, stop);
    const own = asScored || !token.z ? one.share : Math.min(1, (one.weight ?? 1) * Math.exp(scale * real(one.d) - real(token.z[one.store][stop])));
    return { ...one, share: all > 0 ? own * lambdas[one.store] / all : 0 };
  });
  const shown = near.sort((a, b) => b.share - a.share).slice(0, most);
  const rest = Math.max(0, (all > 0 ? 1 : 0) - sum(shown.map((one) => one.share)));
  const hits = sum(shown.filter((one) => one.w === token.w).map((one) => one.share));
  const others = token.of ? sum(token.of) - shown.length : null;
  return { shown, rest, restOnToken: Math.min(rest, Math.max(0, knn - hits)), others };
}

function decimal(value, format) {
  const number = real(value);
  return Number.isFinite(number) ? format(number) : Number.isNaN(number) ? "nan" : number > 0 ? "inf" : "-inf";
}
const fixed = (value, digits) => decimal(value, (number) => number.toFixed(digits));
const signed = (value, digits) => (value >= 0 ? "+" : "") + fixed(value, digits);
const percent = (value, digits = 1) => decimal(value, (number) => `${(100 * number).toFixed(digits)}%`);
const whole = (value) => value.toLocaleString("en");
const probability = (value) => decimal(value,
  (p) => p === 0 ? "0" : p >= 0.001 ? p.toFixed(p >= 0.1 ? 3 : 4) : p.toExponential(1));
const short = (value) => decimal(value, (number) => String(Number(number.toPrecision(4))));
const TINY = 0.0005; // a share that would be written 0.0%
