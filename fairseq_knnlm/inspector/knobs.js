// Sliders for lambda and temperature. Lambda is computed here for any value: a mixture needs p_LM and p_kNN alone. So is
// the temperature at the stops of its slider, for which the page has p_kNN of every token; any other is the server's.

let knobs = []; // {read(): shows the settings} for each slider
let home = null; // the settings of the first text, to come back to

function chosenSettings() {
  return { lambda: settings.lambdas, temperature: data.about.stores.map((store, number) => temperatureAt(store, settings.stops[number])) };
}

function changeSettings(change) {
  change();
  const scored = settingsOf(data.about);
  asScored = JSON.stringify(scored) === JSON.stringify(settings);
  refresh();
  for (const knob of knobs) knob.read();
}

function knob(name, id, slider, value, explanation) {
  const label = element("label", { for: id }, name);
  return element("div", { class: "knob", title: explanation }, label, slider, value);
}

function lambdaKnob(number, prefix) {
  const id = `lambda-${number}`;
  const slider = element("input", { type: "range", id, min: 0, max: 1, step: 0.005 });
  const value = element("input", { type: "number", min: 0, max: 1, step: "any", "aria-label": `${prefix}lambda, a number` });
  const set = (text) => {
    const others = sum(settings.lambdas) - settings.lambdas[number];
    const wanted = Number(text);
    if (text === "" || !Number.isFinite(wanted)) return;
    changeSettings(() => { settings.lambdas[number] = Math.max(0, Math.min(Number((1 - others).toFixed(6)), wanted)); });
  };
  slider.addEventListener("input", () => set(slider.value));
  value.addEventListener("change", () => set(value.value));
  const read = () => {
    slider.value = settings.lambdas[number];
    if (document.activeElement !== value) value.value = short(settings.lambdas[number]);
  };
  knobs.push({ read });
  return knob(`${prefix}lambda`, id, slider, value, "The weight of what was retrieved.");
}

function temperatureKnob(number, store, prefix) {
  const id = `temperature-${number}`;
  const slider = element("input", { type: "range", id, min: 0, max: store.temperatures.length - 1, step: 1 });
  const value = live
    ? element("input", { type: "number", min: 0, step: "any", "aria-label": `${prefix}temperature, a number` })
    : element("output", { for: id });
  slider.addEventListener("input", () => changeSettings(() => { settings.stops[number] = Number(slider.value); }));
  if (live) {
    value.addEventListener("change", () => {
      const wanted = Number(value.value), stop = store.temperatures.findIndex((one) => short(one) === short(wanted));
      if (!(wanted > 0)) return;
      if (stop >= 0) changeSettings(() => { settings.stops[number] = stop; });
      else {
        const asked = chosenSettings();
        asked.temperature[number] = wanted;
        ask("/score", asked);
      }
    });
  }
  const read = () => {
    const text = short(store.temperatures[settings.stops[number]]);
    slider.value = settings.stops[number];
    slider.setAttribute("aria-valuetext", text);
    if (!live) value.textContent = text;
    else if (document.activeElement !== value) value.value = text;
  };
  knobs.push({ read });
  return knob(`${prefix}temperature`, id, slider, value, "How evenly neighbours near and far share the mass.");
}

function reset() {
  const stops = data.about.stores.map((store, number) => store.temperatures.findIndex((one) => short(one) === short(home.temperature[number])));
  if (stops.every((stop) => stop >= 0)) changeSettings(() => { settings = { lambdas: [...home.lambda], stops }; });
  else ask("/score", home);
}

function showKnobs() {
  const box = byId("knobs"), stores = data.about.stores;
  knobs = [];
  box.textContent = "";
  box.hidden = !stores.length || !stores.every((store) => store.temperatures);
  if (box.hidden) return;
  home ??= structuredClone(chosenSettings());
  stores.forEach((store, number) => {
    const prefix = stores.length > 1 ? `${store.name}: ` : "";
    box.append(lambdaKnob(number, prefix), temperatureKnob(number, store, prefix));
  });
  const button = element("button", { type: "button" }, "reset");
  button.addEventListener("click", reset);
  box.append(button, element("p", { class: "note" }, "Your browser computes every lambda exactly, and the temperature at the "
    + `${stores[0].temperatures.length} stops of its slider. ${live ? "Any other temperature that you type is asked from the server." : ""}`));
  for (const one of knobs) one.read();
}
byId("knobs").addEventListener("submit", (event) => event.preventDefault());
