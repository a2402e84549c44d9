// The daemon's own HTTP interface: nothing else is ever asked.

let key = sessionStorage.getItem("swarmnode-key") ?? "";

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function useKey(value) {
  key = value;
  sessionStorage.setItem("swarmnode-key", value);
}

function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch { /* not ours, or cut off: the status has to do */ }
  return new ApiError(response.status, error.code ?? "", error.message ?? `the daemon answered with ${response.status}`);
}

export async function get(path, seconds = 5) {
  const response = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(seconds * 1000) });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

// Gives the pieces of an answer's text as they come. Ends with the stream, at `signal`, or with an ApiError.
export async function* chat(messages, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ messages, stream: true }),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    yield* eventsOf(reader);
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function* eventsOf(reader) {
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "", "the connection to the daemon was lost in the middle of the answer");
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith(":")) {
        yield { waiting: event.slice(1).trim() };
        continue;
      }
      const data = event.split("\n").filter((l) => l.startsWith("data:")).map((l) => l.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(0, parsed.error.code ?? "", parsed.error.message);
      const text = parsed.choices?.[0]?.delta?.content;
      if (text) yield { text };
    }
  }
}
