// Asks the daemon every so often while somebody looks, and shows what it says.

import { get, useKey } from "./api.js";
import * as chat from "./chat.js";
import { $, element, number, svg } from "./dom.js";
import * as heat from "./heat.js";
import * as mesh from "./mesh.js";

const STATUS_MS = 1500;
const PLACEMENT_MS = 10_000;
const EQUIVALENCE_MS = 30_000;
const SAMPLES = 80; // two minutes

let before = null;
let placedAt = -Infinity, placedAs = "", comparedAt = -Infinity;
const trend = [];

async function look() {
  if (document.visibilityState === "visible") {
    try {
      const status = await get("/api/status");
      $("key-form").hidden = true;
      show(status);
      await lookFurther(status);
    } catch (error) {
      lost(error);
    }
  }
  setTimeout(look, STATUS_MS);
}

async function lookFurther(status) {
  const now = performance.now(), named = `${status.term}.${status.epoch}.${status.ready}`;
  if (now - placedAt > PLACEMENT_MS || named !== placedAs) {
    [placedAt, placedAs] = [now, named];
    heat.show(await get("/api/placement").catch(() => null), status.model);
  }
  if (now - comparedAt > EQUIVALENCE_MS) {
    comparedAt = now;
    mesh.showEquivalence(await get("/api/equivalence"));
  }
}

function lost(error) {
  $("verdict").className = "verdict lost";
  if (error.status === 401) {
    $("key-form").hidden = false;
    $("verdict").textContent = "an API key is needed";
  } else {
    $("verdict").textContent = `the daemon does not answer: ${error.message}`;
  }
}

function show(status) {
  $("swarm-name").textContent = status.swarm.name ?? "no swarm";
  document.title = `${status.swarm.name ?? "swarmnode"}: ${status.ready ? "ready" : "not ready"}`;
  $("verdict").className = `verdict ${status.ready ? "ready" : "not-ready"}`;
  setText("verdict", status.ready ? "ready" : `not ready: ${status.reason}`);
  const leader = status.peers.find((peer) => peer.peer_id === status.leader);
  const led = leader ? `, led by ${leader.name} in term ${status.term}` : "";
  $("model").textContent = status.model ? `${status.model.name} (${status.model.architecture})${led}` : "no model";
  for (const key of ["running", "waiting", "finished", "failed"]) $(key).textContent = status.requests?.[key] ?? "-";
  rates(status);
  const findings = status.findings.map((one) => element("li", {}, `${one.message}. ${one.hint}`));
  $("findings").replaceChildren(...findings);
  mesh.show(status);
  $("versions").textContent = `swarmnode ${status.version}`;
  $("this-peer").textContent = `this peer: ${status.self}`;
}

// A status region speaks whenever its text is set: only when it has changed.
function setText(id, words) {
  if ($(id).textContent !== words) $(id).textContent = words;
}

function rates(status) {
  const now = performance.now() / 1000;
  const next = { now, leader: status.leader, tokens: status.requests?.tokens, layers: status.model?.layers };
  if (before && before.leader === next.leader && next.tokens >= before.tokens) {
    const rate = (next.tokens - before.tokens) / (now - before.now);
    $("tokens-rate").textContent = number(rate, 1);
    const decoded = (next.layers?.decode_computed ?? 0) - (before.layers?.decode_computed ?? 0);
    const spent = (next.layers?.decode_round_trip_s ?? 0) - (before.layers?.decode_round_trip_s ?? 0);
    if (decoded > 0) $("layer-ms").textContent = number((spent / decoded) * 1000, 2);
    trend.push(rate);
    if (trend.length > SAMPLES) trend.shift();
    const most = Math.max(1, ...trend);
    const points = trend.map((value, i) => `${(i * 300) / (SAMPLES - 1)},${58 - (value / most) * 54}`).join(" ");
    $("trend").replaceChildren(svg("polyline", { points }));
    $("trend").setAttribute("aria-label", `tokens a second over the last two minutes: now ${number(rate, 1)}, at most ${number(most, 1)}`);
  }
  before = next;
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
});
chat.start();
heat.start();
look();
