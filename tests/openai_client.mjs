// OpenAI's npm package, untouched, against the URL in argv[2] and the model in argv[3]; what came of it as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = process.argv[3];
const messages = [{ role: "user", content: "Tell me a story." }];
const asked = { model, messages, temperature: 0, max_tokens: 12 };
const told = {};

told.models = (await client.models.list()).data.map((each) => each.id);

const whole = await client.chat.completions.create(asked);
told.whole = whole.choices[0].message.content;
told.usage = whole.usage;

const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
told.streamed = "";
for await (const chunk of stream) {
  told.streamed += chunk.choices[0]?.delta?.content ?? "";
  told.finish_reason = chunk.choices[0]?.finish_reason ?? told.finish_reason;
  told.streamed_usage = chunk.usage ?? told.streamed_usage;
}

const helped = client.chat.completions.stream(asked);
told.helped = await helped.finalContent();

const likely = await client.chat.completions.create({ ...asked, max_tokens: 2, logprobs: true, top_logprobs: 3 });
told.alternatives = likely.choices[0].logprobs.content.map((each) => each.top_logprobs.length);

told.completion = (await client.completions.create({ model, prompt: "Once upon", max_tokens: 4 })).object;

const leaving = await client.chat.completions.create({ ...asked, max_tokens: 400, stream: true });
for await (const chunk of leaving) {
  leaving.controller.abort();
}

told.errors = [];
for (const bad of [{ model: "gpt-5" }, { temperature: -1 }, { messages: [{ role: "user", content: "x".repeat(9000) }] }]) {
  try {
    await client.chat.completions.create({ ...asked, ...bad });
  } catch (error) {
    told.errors.push([error.constructor.name, error.status, error.code, error.param]);
  }
}
console.log(JSON.stringify(told));
