// The peers, as a picture and as a table; what they agree on, as a matrix.

import { $, element, number, svg } from "./dom.js";

const away = (peer) => peer.state === "gone" || peer.state === "suspect";
const SHOWN_MAX = 32; // of a picture; the table has all

export function show(status) {
  graph(status);
  const rows = status.peers.map((peer) => {
    const backends = (peer.backends ?? []).map((one) => one.name).join(", ") || "-";
    const fitness = peer.fitness && peer.fitness !== "fit" ? `, ${peer.fitness}` : "";
    const cells = [
      ["peer", peer.name + (peer.peer_id === status.self ? " (this one)" : ""), ""],
      ["state", peer.state + loaded(peer.progress) + fitness, `state-${peer.state}`],
      ["roles", peer.roles.join(", ") || "-", ""],
      ["experts", peer.experts_held ?? "-", "number"],
      ["latency", peer.rtt_ms == null ? "-" : `${number(peer.rtt_ms, 1)} ms`, "number"],
      ["load", peer.load == null ? "-" : `${number(peer.load * 100)} %`, "number"],
      ["backend", backends, ""],
    ];
    const row = cells.map(([label, text, kind], i) =>
      element(i ? "td" : "th", { "data-label": label, class: kind, ...(i ? {} : { scope: "row" }) }, String(text)));
    return element("tr", { "data-peer": peer.name }, ...row);
  });
  $("peers").tBodies[0].replaceChildren(...rows);
}

function loaded(progress) {
  const total = progress?.total_bytes, done = progress?.done_bytes;
  return total > 0 && done < total ? ` ${Math.floor((done * 100) / total)} %` : "";
}

function graph(status) {
  const centre = status.peers.find((peer) => peer.peer_id === status.leader);
  const others = status.peers.filter((peer) => peer !== centre).slice(0, SHOWN_MAX);
  const places = others.map((_, i) => {
    const angle = (2 * Math.PI * i) / others.length - Math.PI / 2;
    return [120 * Math.cos(angle), 78 * Math.sin(angle)];
  });
  const shapes = [];
  others.forEach((peer, i) => {
    const [x, y] = places[i], kind = away(peer) ? "away" : "";
    if (centre) {
      shapes.push(svg("line", { x1: 0, y1: 0, x2: x, y2: y, class: kind }));
      if (peer.rtt_ms != null && !away(peer))
        shapes.push(svg("text", { x: x * 0.55, y: y * 0.55, class: "faint" }, `${number(peer.rtt_ms, 1)} ms`));
    }
    shapes.push(svg("circle", { cx: x, cy: y, r: 8, class: kind }));
    shapes.push(svg("text", { x, y: y + 19 }, short(peer.name)));
  });
  if (centre) {
    shapes.push(svg("circle", { cx: 0, cy: 0, r: 11, class: away(centre) ? "away" : "leads" }));
    shapes.push(svg("text", { x: 0, y: 23 }, short(centre.name)));
  }
  $("graph").replaceChildren(...shapes);
}

const short = (name) => (name.length > 14 ? `${name.slice(0, 13)}…` : name);

export function showEquivalence({ peers, measured }) {
  const judged = new Map();
  for (const pair of measured?.pairs ?? []) {
    judged.set(`${pair.a} ${pair.b}`, pair.pass);
    judged.set(`${pair.b} ${pair.a}`, pair.pass);
  }
  $("equivalence-words").textContent = measured
    ? `Measured ${new Date(measured.measured_at * 1000).toLocaleString()} by swarmctl equivalence --all; where it says nothing, by numeric class.`
    : "By numeric class: the same class means the same bits. `swarmctl equivalence --all` compares all pairs.";
  const head = element("tr", {}, element("td", {}), ...peers.map((peer) => element("th", { scope: "col" }, short(peer.name))));
  const rows = peers.map((a) =>
    element("tr", {}, element("th", { scope: "row" }, short(a.name)), ...peers.map((b) => cell(a, b, judged))));
  $("matrix").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}

function cell(a, b, judged) {
  if (a === b) return element("td", {}, "·");
  const pass = judged.get(`${a.peer_id} ${b.peer_id}`);
  if (a.numeric_class && a.numeric_class === b.numeric_class && pass !== false) return element("td", { class: "same" }, "same bits");
  if (pass === true) return element("td", { class: "within" }, "within limits");
  if (pass === false) return element("td", { class: "out" }, "out of limits");
  return element("td", {}, a.numeric_class && b.numeric_class ? "other class" : "not known");
}
