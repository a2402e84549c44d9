// The chat box. The conversation lives in this page alone and ends with it.

import { chat } from "./api.js";
import { $, element } from "./dom.js";

const messages = [];
let running = null;

export function start() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("forget").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    $("log").replaceChildren();
    say("");
    $("message").focus();
  });
}

function say(words) {
  $("chat-state").textContent = words;
}

function show(who, text) {
  const body = element("div", {}, text);
  $("log").append(element("article", {}, element("h3", {}, who), body));
  $("log").scrollTop = $("log").scrollHeight;
  return body;
}

async function send() {
  const text = $("message").value.trim();
  if (!text || running) return;
  $("message").value = "";
  const asked = { role: "user", content: text };
  show("you", text);
  const body = show("swarm", "");
  const mine = (running = new AbortController());
  // A screen reader is told the whole answer, not each token.
  $("log").setAttribute("aria-busy", "true");
  $("stop").disabled = false;
  $("send").disabled = true;
  say("waiting for the first token");
  const began = performance.now();
  let answer = "", pieces = 0;
  try {
    for await (const event of chat([...messages, asked], mine.signal)) {
      if (event.waiting) say(event.waiting);
      if (!event.text) continue;
      answer += event.text;
      pieces += 1;
      const follow = $("log").scrollTop + $("log").clientHeight >= $("log").scrollHeight - 40;
      body.textContent = answer;
      if (follow) $("log").scrollTop = $("log").scrollHeight;
      say(`answering, ${(pieces / ((performance.now() - began) / 1000)).toFixed(1)} pieces a second`);
    }
    say("");
  } catch (error) {
    if (mine.signal.aborted) {
      say("stopped");
    } else {
      body.append(element("p", { class: "error" }, error.message));
      say("no answer");
    }
  }
  if (running === mine) {
    if (answer) messages.push(asked, { role: "assistant", content: answer });
    running = null;
    $("log").setAttribute("aria-busy", "false");
    $("stop").disabled = true;
    $("send").disabled = false;
  }
}
