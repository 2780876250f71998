// The AI SDK (packages ai, @ai-sdk/openai-compatible, @ai-sdk/openai, zod) against a server.
// usage: node ai_sdk.mjs DIRECTORY_WITH_NODE_MODULES URL MODEL
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [directory, url, model] = process.argv.slice(2);
const require = createRequire(join(directory, 'package.json'));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const version = (name) =>
  JSON.parse(readFileSync(join(directory, 'node_modules', name, 'package.json'))).version;

const { generateObject, generateText, streamObject, streamText, stepCountIs, tool } = await load('ai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
const { createOpenAI } = await load('@ai-sdk/openai');
const { z } = await load('zod');

const schema = z.object({
  place: z.enum(['Rome', 'Oslo', 'Lima']),
  days: z.number().int().min(1).max(7),
  dry: z.boolean(),
});
const prompt = 'What will the weather be in Rome, and for how many days?';
const check = (condition, what) => {
  if (!condition) throw new Error(what);
};
// Whoever reads a stream hears of errors as one of its parts.
const onError = ({ error }) => {
  throw error;
};

const chat = createOpenAICompatible({
  name: 'specserve',
  baseURL: url,
  apiKey: 'none',
  supportsStructuredOutputs: true,
  includeUsage: true,
})(model);
const responses = createOpenAI({ baseURL: url, apiKey: 'none' }).responses(model);
const stateless = { providerOptions: { openai: { store: false } } };

const shared = (languageModel, more) => ({ model: languageModel, prompt, maxRetries: 0, ...more });

const cases = (languageModel, more) => ({
  'generateObject and streamObject': async () => {
    const { object } = await generateObject({ ...shared(languageModel, more), schema });
    schema.parse(object);
    const stream = streamObject({ ...shared(languageModel, more), schema, onError });
    schema.parse(await stream.object);
  },
  'generateText with tools, three steps': async () => {
    const called = [];
    const weather = tool({
      description: 'Tells the weather.',
      inputSchema: schema,
      execute: async (input) => {
        called.push(input);
        return { dry: input.dry };
      },
    });
    const { steps } = await generateText({
      ...shared(languageModel, more),
      tools: { weather },
      stopWhen: stepCountIs(3),
      prepareStep: ({ stepNumber }) =>
        stepNumber === 0
          ? { toolChoice: { type: 'tool', toolName: 'weather' } }
          : { toolChoice: stepNumber === 1 ? 'required' : 'none' },
      maxOutputTokens: 200,
      stopSequences: languageModel === chat ? ['.'] : undefined,
    });
    check(steps.length === 3, `${steps.length} steps`);
    check(called.length >= 2, `${called.length} calls`);
    called.forEach((input) => schema.parse(input));
  },
  'streamText: words, then a call': async () => {
    const words = streamText({ ...shared(languageModel, more), maxOutputTokens: 12, onError });
    let said = '';
    for await (const piece of words.textStream) said += piece;
    check(said.length > 0, 'no words');
    check((await words.finishReason) === 'length', `ended by ${await words.finishReason}`);
    check((await words.usage).outputTokens === 12, 'usage');
    const called = streamText({
      ...shared(languageModel, more),
      tools: { weather: tool({ inputSchema: schema }) },
      toolChoice: 'required',
      onError,
    });
    const calls = await called.toolCalls;
    check(calls.length >= 1, 'no call');
    calls.forEach((call) => schema.parse(call.input));
  },
});

const results = [];
const run = async (packageName, endpoint, set) => {
  for (const [what, work] of Object.entries(set)) {
    const started = performance.now();
    let fault = '';
    try {
      await work();
    } catch (error) {
      console.error(error);
      fault = `${error.name}: ${String(error.message).slice(0, 200)}`;
    }
    const seconds = (performance.now() - started) / 1000;
    console.error(`${packageName}, ${endpoint}: ${what}: ${fault || 'passes'}`);
    const versions = `${version(packageName)} (ai ${version('ai')})`;
    results.push({ package: packageName, version: versions, what: `${endpoint}: ${what}`, fault, seconds });
  }
};
await run('@ai-sdk/openai-compatible', 'chat', cases(chat, {}));
await run('@ai-sdk/openai', 'responses', cases(responses, stateless));
console.log(JSON.stringify(results));
