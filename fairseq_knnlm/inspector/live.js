// The live page: a text goes to the server with the settings of the sliders, and comes back scored or continued.

let asking = 0;
async function ask(path, asked = null) {
  const status = byId("status"), buttons = document.querySelectorAll("#live button, #knobs button");
  const number = ++asking, chosen = asked ?? (data ? chosenSettings() : {});
  status.textContent = "working \u2026";
  for (const button of buttons) button.disabled = true;
  try {
    const response = await fetch(path, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ text: byId("input").value, ...chosen }),
    });
    const answer = await response.json();
    if (number !== asking) return; // a later request has been made meanwhile
    if (answer.error) { status.textContent = answer.error; return; }
    if (answer.text !== undefined) byId("input").value = answer.text;
    data = answer.data;
    status.textContent = answer.note || "";
    show();
  } catch (error) {
    status.textContent = "the server does not answer";
  } finally {
    for (const button of buttons) button.disabled = false;
  }
}

if (live) {
  byId("live").hidden = false;
  const examples = JSON.parse(byId("examples").textContent);
  let next = 0;
  byId("example").hidden = !examples.length;
  byId("example").addEventListener("click", () => {
    byId("input").value = examples[next];
    next = (next + 1) % examples.length;
    ask("/score");
  });
  byId("live").addEventListener("submit", (event) => { event.preventDefault(); ask("/score"); });
  byId("continue").addEventListener("click", () => ask("/continue"));
}
show();
