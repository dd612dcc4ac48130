// Filters the questions of a run and shows one: its prompt with the gold item outlined and every item shaded by the
// attention of the last token, and every method's reply. Without this script the page has some wrong answers as text.
(() => {
  "use strict";
  const root = document.currentScript.parentElement;
  const data = JSON.parse(root.querySelector("script[type]").textContent);
  const find = selector => root.querySelector(selector);
  const list = find(".list select");
  const filters = Object.fromEntries(
    [...root.querySelectorAll("[data-filter]")].map(field => [field.dataset.filter, field]));
  const shades = find(".shades");
  const layer = shades && shades.querySelector("input");
  const shaded = shades && shades.querySelector("select");
  if (shades) {
    layer.max = data.layers - 1;
    layer.value = data.layer;
  }
  const MAX_LISTED = 1000;
  // As many as a phone shows in a line.
  const MAX_CHARACTERS = 38;
  // A question is [id, gold position, answers, replies]; a reply [score, outcome, text, prompt changed] or null.
  const last = data.methods.length - 1;

  function isRight(reply) { return reply !== null && reply[0] !== null && reply[0] >= 1; }
  function isWrong(reply) { return reply !== null && reply[0] !== null && reply[0] < 1; }

  function value(name) { return filters[name] ? filters[name].value : ""; }
  function method() { return Number(value("method") || last); }

  const KINDS = {
    all: () => true,
    right: (before, after) => isRight(after),
    wrong: (before, after) => isWrong(after),
    fixed: (before, after) => isWrong(before) && isRight(after),
    broken: (before, after) => isRight(before) && isWrong(after),
  };

  function passes(question) {
    const [, position, , replies] = question;
    const place = value("position"), outcome = value("outcome");
    if (place !== "" && String(position) !== place) return false;
    if (!KINDS[value("kind")](replies[0], replies[method()])) return false;
    return outcome === "" || replies.some(reply => reply && (reply[1] || "answered") === outcome);
  }

  function sign(reply) {
    if (reply === null) return "\u00b7";
    if (reply[0] === null) return "?";
    return reply[0] >= 1 ? "\u2713" : "\u2717";
  }

  function shownMethods() { return last > 1 ? [0, method()] : data.methods.map((_, number) => number); }

  function makeOption(number) {
    const [id, position, answers, replies] = data.questions[number];
    const shown = shownMethods().map(index => replies[index]);
    const texts = shown.filter(Boolean).map(reply => reply[2].trim().slice(0, 24));
    const place = position === null ? "" : ` at ${position}`;
    const text = `${shown.map(sign).join(" ")}  ${id}${place}: ${answers[0] ?? ""} \u2190 ${texts.join(" | ")}`;
    const line = text.replace(/\s+/g, " ");
    return new Option(line.length > MAX_CHARACTERS ? `${line.slice(0, MAX_CHARACTERS - 1)}\u2026` : line, number);
  }

  function fill() {
    const passing = [...data.questions.keys()].filter(number => passes(data.questions[number]));
    // Questions whose prompt is here come first.
    const ordered = [...passing.filter(n => n in data.prompts), ...passing.filter(n => !(n in data.prompts))];
    list.replaceChildren(...ordered.slice(0, MAX_LISTED).map(makeOption));
    const cut = ordered.length > MAX_LISTED ? `, the first ${MAX_LISTED} listed` : "";
    const prompts = passing.filter(number => number in data.prompts).length;
    find("[role=status]").textContent =
      `${passing.length} of ${data.questions.length} prompts, ${prompts} with their text${cut}`;
    list.selectedIndex = ordered.length ? 0 : -1;
    show();
  }

  function element(tag, text, className) {
    const made = document.createElement(tag);
    made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function show() {
    const number = list.value;
    find(".detail").hidden = number === "";
    if (number === "") return;
    const [id, position, answers, replies] = data.questions[number];
    const place = position === null ? "" : `, gold position ${position}`;
    find("h3").textContent = `${id}${place}; expected: ${answers.join(" | ") || "not published"}`;
    find("tbody").replaceChildren(...replies.flatMap((reply, index) => {
      if (reply === null) return [];
      const row = document.createElement("tr");
      const score = reply[0] === null ? reply[1] : `${sign(reply)} ${Number(reply[0].toFixed(3))}`;
      const changed = reply[3] ? " (changed prompt)" : "";
      row.append(element("td", data.labels[index] + changed), element("td", score), element("td", reply[2].trim()));
      return [row];
    }));
    const maps = data.attention[number] || {};
    if (shades) {
      shades.hidden = !Object.keys(maps).length;
      const before = shaded.value;
      shaded.replaceChildren(...Object.keys(maps).map(index => new Option(data.labels[index], index)));
      if (before in maps) shaded.value = before;
      else if (method() in maps) shaded.value = method();
    }
    drawPrompt(number, maps);
  }

  function drawPrompt(number, maps) {
    const pieces = data.prompts[number];
    const prompt = find("pre");
    if (!pieces) {
      prompt.textContent = `not on this page: posbench show ${data.run} --id ${data.questions[number][0]}`;
      return;
    }
    const numItems = (pieces.length - 1) / 2;
    let weights = null;
    if (shades && !shades.hidden) {
      weights = Uint8Array.from(atob(maps[shaded.value]), sign => sign.charCodeAt(0));
      shades.querySelector("output").textContent = layer.value;
    }
    prompt.replaceChildren(...pieces.map((piece, index) => {
      if (index % 2 === 0) return document.createTextNode(piece);
      const item = (index - 1) / 2;
      const mark = element("mark", piece, data.gold[number].includes(item) ? "gold" : "");
      mark.title = `item ${item}`;
      if (weights) {
        const shade = weights[layer.value * numItems + item] / 255;
        mark.style.setProperty("--shade", shade);
        mark.title += `, attention ${(shade * shade * data.top).toPrecision(2)} per token`;
      }
      return mark;
    }));
  }

  function choosePosition(position, methodName) {
    const index = data.methods.indexOf(methodName);
    if (filters.method && index > 0) filters.method.value = index;
    if (filters.position) filters.position.value = position;
    fill();
  }

  // Points of the curve on this page become buttons; those that lead to another page are links already.
  for (const point of document.querySelectorAll("g.point")) {
    point.setAttribute("role", "button");
    const choose = event => {
      if (event.type === "keydown" && event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choosePosition(point.dataset.position, point.dataset.method);
      root.scrollIntoView({ block: "nearest" });
    };
    point.addEventListener("click", choose);
    point.addEventListener("keydown", choose);
  }
  for (const hint of document.querySelectorAll(".curve .hint")) {
    hint.textContent = "point at a dot, or Tab to it, for its numbers; click for its questions";
  }
  for (const field of Object.values(filters)) field.addEventListener("change", fill);
  list.addEventListener("change", show);
  if (shades) {
    layer.addEventListener("input", () => drawPrompt(list.value, data.attention[list.value]));
    shaded.addEventListener("change", () => drawPrompt(list.value, data.attention[list.value]));
  }
  const asked = new URLSearchParams(location.hash.slice(1)).get("position");
  find(".explorer").hidden = false;
  find(".static").hidden = true;
  if (asked !== null && filters.position) {
    choosePosition(asked);
    root.scrollIntoView();
  } else {
    fill();
  }
})();
