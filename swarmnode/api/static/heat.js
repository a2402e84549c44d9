// Coverage: a cell for each expert of each layer, coloured by its copies; arrow keys say what is under the cursor.

import { $, number } from "./dom.js";

let copies = new Map(); // layer -> Map of expert -> names of holders
let layers = [], experts = 0;
let at = [0, 0];

export function start() {
  const canvas = $("heat");
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move || !layers.length) return;
    event.preventDefault();
    at = [clamp(at[0] + move[0], layers.length), clamp(at[1] + move[1], experts)];
    draw();
    tell();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!layers.length) return;
    const box = canvas.getBoundingClientRect();
    at = [
      clamp(Math.floor(((event.clientY - box.top) / box.height) * layers.length), layers.length),
      clamp(Math.floor(((event.clientX - box.left) / box.width) * experts), experts),
    ];
    tell();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));

export function show(placement, model) {
  copies = new Map();
  for (const peer of placement?.peers ?? [])
    for (const { layer, experts: held } of peer.held) {
      if (!copies.has(layer)) copies.set(layer, new Map());
      const row = copies.get(layer);
      for (const expert of held) row.set(expert, [...(row.get(expert) ?? []), peer.name]);
    }
  for (const { layer } of placement?.coverage.missing ?? []) if (!copies.has(layer)) copies.set(layer, new Map());
  layers = [...copies.keys()].sort((a, b) => a - b);
  const most = Math.max(-1, ...[...copies.values()].flatMap((row) => [...row.keys()]));
  const missing = Math.max(-1, ...(placement?.coverage.missing ?? []).map((one) => one.expert));
  experts = Math.max(most, missing) + 1;
  at = [clamp(at[0], layers.length || 1), clamp(at[1], experts || 1)];
  $("coverage-words").textContent = words(placement, model);
  draw();
}

function words(placement, model) {
  if (!placement) return "no placement yet";
  const { min_copies: least, missing } = placement.coverage;
  const state = missing.length
    ? `${missing.length} experts are on no peer`
    : `every expert has at least ${least} ${least === 1 ? "copy" : "copies"}`;
  const time = placement.token_ms ? `, ${number(placement.token_ms, 0)} ms a token expected` : "";
  return `${model?.experts ?? "?"} experts in ${layers.length} layers: ${state}${time}`;
}

function draw() {
  const canvas = $("heat");
  canvas.hidden = !layers.length;
  if (!layers.length) return;
  const style = getComputedStyle(document.documentElement);
  const colours = [0, 1, 2, 3].map((count) => style.getPropertyValue(`--copies-${count}`).trim());
  const cell = Math.max(2, Math.min(16, Math.floor(1024 / experts)));
  canvas.width = experts * cell;
  canvas.height = layers.length * cell;
  const context = canvas.getContext("2d");
  layers.forEach((layer, y) => {
    const row = copies.get(layer);
    for (let x = 0; x < experts; x++) {
      context.fillStyle = colours[Math.min(3, row.get(x)?.length ?? 0)];
      context.fillRect(x * cell, y * cell, cell - (cell > 4), cell - (cell > 4));
    }
  });
  if (document.activeElement === canvas) {
    context.strokeStyle = style.getPropertyValue("--text");
    context.strokeRect(at[1] * cell + 0.5, at[0] * cell + 0.5, cell - 1, cell - 1);
  }
}

function tell() {
  const layer = layers[at[0]], holders = copies.get(layer)?.get(at[1]) ?? [];
  $("cell").textContent = `layer ${layer}, expert ${at[1]}: ${holders.length ? holders.join(", ") : "nobody"}`;
}
