"use strict";
// An item is one question (and sample): {key, episodes: [one per policy, or null]}.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const ALL = "all";
const SVG = "http://www.w3.org/2000/svg";
// What each filter reads from an episode: one value, or several.
const FILTERS = {
  environment: episode => [episode.environment],
  task: episode => [episode.task],
  stop_reason: episode => [episode.stop_reason],
  tool: episode => [...new Set(episode.steps.map(step => step.tool).filter(Boolean))],
};
const everyEpisode = data.items.flatMap(item => item.episodes.filter(Boolean));
let shown = [];
let current = 0;

// All text goes in as text nodes: an agent may have written anything.
function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  Object.assign(node, properties);
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

function svgElement(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// ---------------------------------------------------------------------------------------------- filters

function fillFilters() {
  const options = (id, values) => byId(id).append(...values.map(value => element("option", {value}, value)));
  for (const [id, read] of Object.entries(FILTERS)) {
    const values = [...new Set(everyEpisode.flatMap(read))].sort();
    options(id, [ALL, ...values]);
    byId(id).parentElement.hidden = id === "environment" && values.length < 2;
  }
  const pair = data.policies.length > 1;
  options("view", pair ? [data.policies.join(" and "), ...data.policies] : data.policies);
  byId("view").parentElement.hidden = !pair;
  fillResults();
  byId("filters").addEventListener("input", event => {
    if (event.target.id === "view") fillResults();
    applyFilters();
  });
  byId("filters").addEventListener("submit", event => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(() => { fillResults(); applyFilters(); }));
}

// Which policies are looked at: indices into an item's episodes.
function sides() {
  const all = data.policies.map((_, index) => index);
  return byId("view").selectedIndex > 0 ? [byId("view").selectedIndex - 1] : all;
}

// What can be asked of the results of one policy, or of several on the same item.
function results() {
  const right = (item, side) => item.episodes[side] !== null && item.episodes[side].correct;
  const seen = sides();
  if (seen.length === 1) {
    return {[ALL]: () => true, correct: item => right(item, seen[0]), wrong: item => !right(item, seen[0])};
  }
  const tests = {
    [ALL]: () => true,
    "all correct": item => seen.every(side => right(item, side)),
    "all wrong": item => !seen.some(side => right(item, side)),
  };
  for (const side of seen) {
    tests[`only ${data.policies[side]} correct`] = item =>
      seen.every(other => right(item, other) === (other === side));
  }
  return tests;
}

function fillResults() {
  byId("result").replaceChildren(...Object.keys(results()).map(value => element("option", {value}, value)));
}

function fits(episode) {
  const low = byId("low").value === "" ? -Infinity : Number(byId("low").value);
  const high = byId("high").value === "" ? Infinity : Number(byId("high").value);
  return episode.reward >= low && episode.reward <= high && Object.entries(FILTERS).every(
    ([id, read]) => byId(id).value === ALL || read(episode).includes(byId(id).value));
}

function words(item) {
  const said = item.episodes.filter(Boolean).flatMap(episode => [episode.id, episode.question,
    ...episode.steps.flatMap(step => [step.think, step.call, step.observation, step.response])]);
  return said.filter(Boolean).join("\n").toLowerCase();
}

function applyFilters() {
  const seen = sides();
  const result = results()[byId("result").value];
  const text = byId("text").value.toLowerCase();
  shown = data.items.filter(item => result(item) && (text === "" || words(item).includes(text)) &&
    seen.some(side => item.episodes[side] !== null && fits(item.episodes[side])));
  const right = seen.map(side => `${shown.filter(item => item.episodes[side]?.correct).length} correct` +
    (data.policies.length > 1 ? ` (${data.policies[side]})` : ""));
  byId("count").textContent = `${shown.length} of ${data.items.length} episodes, ${right.join(", ")}`;
  byId("list").replaceChildren(...shown.map((item, index) => element("li", {}, element("button",
    {type: "button", onclick: () => show(index)}, ...seen.map(side => verdict(item.episodes[side])), item.key,
    element("span", {className: "muted"}, " " + seen.map(side =>
      item.episodes[side] ? item.episodes[side].reward.toFixed(2) : "–").join(" | "))))));
  show(0);
}

function verdict(episode) {
  if (episode === null) return element("span", {className: "muted"}, "– ");
  const node = element("span", {className: episode.correct ? "good" : "bad"}, episode.correct ? "✓ " : "✗ ");
  node.setAttribute("aria-label", episode.correct ? "correct" : "wrong");
  node.setAttribute("role", "img");
  return node;
}

// ---------------------------------------------------------------------------------------------- one item

function show(index) {
  if (shown.length === 0) {
    byId("detail").replaceChildren(element("p", {className: "muted"}, "No episode fits these filters."));
    return;
  }
  current = Math.min(Math.max(index, 0), shown.length - 1);
  byId("list").querySelectorAll("button").forEach((button, position) =>
    button.setAttribute("aria-current", String(position === current)));
  reveal(byId("list").children[current], byId("list").parentElement);
  byId("detail").replaceChildren(...itemNodes(shown[current]));
  byId("detail").scrollTop = 0;
}

// Not scrollIntoView: in Chromium that also moves the place where the Tab key begins.
function reveal(row, box) {
  const inner = row.getBoundingClientRect(), outer = box.getBoundingClientRect();
  if (inner.top < outer.top) box.scrollTop += inner.top - outer.top;
  if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom;
}

function itemNodes(item) {
  const seen = sides();
  const first = item.episodes.find(Boolean);
  const tools = first.tools.flatMap(tool => [element("span", {className: "tag"}, tool), " "]);
  const head = [
    element("h2", {}, item.key),
    element("p", {className: "muted"}, `${first.environment} · ${first.task} · sample ${first.sample}`),
    element("p", {}, element("b", {}, first.question)),
    element("p", {}, "tools: ", ...(tools.length ? tools : ["none"])),
  ];
  if (seen.length === 1) {
    const episode = item.episodes[seen[0]];
    const svg = picture(episode);
    return [...head, summary(episode, data.policies[seen[0]]), element("div", {className: "alone"},
      element("div", {}, svg, rewardTable(episode)), element("div", {}, ...turns(episode, svg)))];
  }
  return [...head, element("div", {className: "sides"}, ...seen.map(side => {
    const episode = item.episodes[side];
    if (episode === null) return element("section", {}, element("h3", {}, data.policies[side]), "not asked");
    const svg = picture(episode);
    return element("section", {}, summary(episode, data.policies[side]), svg, rewardTable(episode),
      ...turns(episode, svg));
  }))];
}

function summary(episode, policy) {
  return element("div", {},
    element("h3", {}, policy, " · ", element("span", {className: episode.correct ? "good" : "bad"},
      episode.correct ? "correct" : "wrong")),
    element("p", {className: "muted"}, `ended: ${episode.stop_reason} · ${episode.tokens} tokens written, ` +
      `${episode.context_tokens} in all · policy version ${episode.policy_version}`));
}

// The picture with what the tools saw and drew, and the path of the answer; numbers are those of the turns.
function picture(episode) {
  if (!episode.pictures.length) return element("p", {className: "muted"}, "(no picture)");
  const {width, height} = episode;
  const svg = svgElement("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "img"});
  const said = [];
  svg.append(svgElement("image", {href: data.pictures[episode.pictures[0]], width, height}));
  episode.steps.forEach((step, index) => {
    const group = svgElement("g", {"data-turn": index});
    for (const mark of step.marks) {
      group.append(...markNodes(mark, width, step.response === null ? "#c2007a" : "#0050d0", index + 1));
      said.push(`turn ${index + 1}: ${mark.kind} ${JSON.stringify(mark.at)}`);
    }
    svg.append(group);
  });
  svg.setAttribute("aria-label", `picture of the question. ${said.join("; ")}`);
  return svg;
}

function markNodes(mark, width, colour, number) {
  const thin = {fill: "none", stroke: colour, "stroke-width": width / 110, "stroke-linejoin": "round"};
  const label = ([x, y]) => svgElement("text", {x: x + width / 28, y: y - width / 32, "font-size": width / 18,
    fill: colour, "font-weight": "bold", stroke: "#fff", "stroke-width": width / 90, "paint-order": "stroke"}, number);
  if (mark.kind === "point") {
    const [cx, cy] = mark.at;
    return [svgElement("circle", {...thin, cx, cy, r: width / 22}), label(mark.at)];
  }
  if (mark.kind === "box") {
    const [x, y, right, bottom] = mark.at;
    const size = {x, y, width: right - x, height: bottom - y};
    return [svgElement("rect", {...thin, ...size, "stroke-dasharray": width / 40}), label([x, y + width / 12])];
  }
  if (mark.kind === "stop") {
    const [x, y] = mark.at, arm = width / 30;
    const cross = `M${x - arm} ${y - arm}l${2 * arm} ${2 * arm}m0 ${-2 * arm}l${-2 * arm} ${2 * arm}`;
    return [svgElement("path", {...thin, d: cross, "stroke-width": width / 70})];
  }
  const points = mark.at.map(point => point.join(",")).join(" ");
  const [x, y] = mark.at[mark.at.length - 1];
  return [svgElement("polyline", {...thin, points, stroke: "#fff", "stroke-width": width / 45, opacity: .7}),
    svgElement("polyline", {...thin, points}),
    svgElement("circle", {cx: x, cy: y, r: width / 70, fill: colour}), label([x, y])];
}

function rewardTable(episode) {
  const number = value => Number.isInteger(value) ? String(value) : value.toFixed(3);
  const rows = [["reward", number(episode.reward)],
    ...Object.entries(episode.components).map(([name, value]) => [`· ${name}`, number(value)]),
    ...Object.entries(episode.facts).map(([name, value]) => [name.replace("_", " "), value]),
    ["response", episode.response === null ? "–" : episode.response]];
  return element("table", {}, element("tbody", {}, ...rows.map(([name, value]) =>
    element("tr", {}, element("th", {scope: "row", className: "muted"}, name), element("td", {}, value)))));
}

function turns(episode, svg) {
  return episode.steps.map((step, index) => {
    const node = turnNode(step, index);
    const choose = on => {
      svg.classList.toggle("chosen", on);
      svg.querySelector(`[data-turn="${index}"]`)?.classList.toggle("chosen", on);
    };
    if (step.marks.length) {
      node.addEventListener("mouseenter", () => choose(true));
      node.addEventListener("mouseleave", () => choose(false));
    }
    return node;
  });
}

function turnNode(step, index) {
  const title = step.response !== null ? "response" : step.tool !== null ? step.tool : "no readable call";
  return element("section", {className: step.failed || !step.well_formed ? "turn failed" : "turn"},
    element("p", {className: "muted"}, `${index + 1}. ${title}` +
      (step.call !== null ? ` · call level ${step.level} of 4` : "") + (step.well_formed ? "" : " · not well formed")),
    step.think ? element("p", {}, element("i", {}, step.think)) : null,
    step.call !== null ? element("pre", {}, step.call) : null,
    step.observation !== null ? element("pre", {className: step.failed ? "observation bad" : "observation"},
      step.observation) : null,
    step.picture !== null ? element("img", {src: data.pictures[step.picture], alt: `picture of turn ${index + 1}`}) : null,
    step.response !== null ? element("pre", {}, element("b", {}, step.response)) : null);
}

// ---------------------------------------------------------------------------------------------- keys

const KEYS = {
  j: () => show(current + 1), ArrowRight: () => show(current + 1),
  k: () => show(current - 1), ArrowLeft: () => show(current - 1),
  Home: () => show(0), End: () => show(shown.length - 1),
  "/": () => byId("text").focus(),
  x: () => byId("filters").reset(),
  "?": () => byId("help").showModal(),
};

document.addEventListener("keydown", event => {
  const typing = ["SELECT", "INPUT"].includes(event.target.tagName);
  if (typing && event.key === "Escape") event.target.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || typing || byId("help").open) return;
  if (!(event.key in KEYS)) return;
  KEYS[event.key]();
  event.preventDefault();
});
byId("next").onclick = KEYS.j;
byId("previous").onclick = KEYS.k;
byId("ask").onclick = KEYS["?"];
if (data.left_out > 0) byId("note").textContent = `${data.left_out} pictures left out to keep the page small`;
fillFilters();
applyFilters();
