// The npm client, as people use it. Prints one JSON object, which the test reads.
import { createRequire } from "node:module";
const require = createRequire(process.argv[2] + "/");
const OpenAI = require("openai");

const [, , , baseURL, model] = process.argv;
const client = new OpenAI({ baseURL, apiKey: "key-for-the-npm-client", maxRetries: 1 });
const messages = [{ role: "user", content: "hi" }];
const result = {};

const completion = await client.completions.create({ model, prompt: "x", max_tokens: 200 });
result.completion = completion.choices[0].text;
result.requestId = completion._request_id;

const chat = await client.chat.completions.create({
  model, messages, prediction: { type: "content", content: "Once upon" },
});
result.chat = chat.choices[0].message.content;
result.accepted = chat.usage.completion_tokens_details.accepted_prediction_tokens;

let streamed = "", usage = null;
const stream = await client.chat.completions.create({
  model, messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
result.streamed = streamed;
result.streamedTokens = usage.completion_tokens;

const helper = client.chat.completions.stream({ model, messages });
result.helper = (await helper.finalChatCompletion()).choices[0].message.content;

result.models = [];
for await (const entry of client.models.list()) result.models.push(entry.id);

result.errors = {};
const failing = {
  bad: () => client.completions.create({ model, prompt: "x", temperature: 9 }),
  missing: () => client.completions.create({ model: "nobody", prompt: "x" }),
  stranger: () => client.withOptions({ apiKey: "wrong" }).models.list(),
};
for (const [name, run] of Object.entries(failing)) {
  try { await run(); result.errors[name] = null; }
  catch (error) { result.errors[name] = [error.constructor.name, error.status, error.code, error.param]; }
}

const left = new AbortController();
const endless = await client.completions.create(
  { model, prompt: "x", max_tokens: 400, ignore_eos: true, stream: true }, { signal: left.signal },
);
for await (const _ of endless) left.abort();

console.log(JSON.stringify(result));
