// An agent of the AI SDK over chat or messages, streamed. Prints [answer, number of calls], or the error's name and status.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { env } = process;
const models = {
  chat: createOpenAICompatible({ name: "asyncrl", baseURL: env.OPENAI_BASE_URL, apiKey: env.OPENAI_API_KEY }),
  messages: createAnthropic({ baseURL: env.ANTHROPIC_BASE_URL + "/v1", apiKey: env.ANTHROPIC_API_KEY }),
};
let calls = 0;
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: ({ a, b }) => {
    calls += 1;
    return env.RESULT || a + b;
  },
});
const errors = [];
const result = streamText({
  model: models[env.MODEL]("policy"),
  system: "Be brief.",
  prompt: "What is 1 + 2, and 3 + 4, and their sum?",
  tools: { add },
  stopWhen: stepCountIs(5),
  onError: ({ error }) => errors.push(error),
});
let text = "";
for await (const piece of result.textStream) text += piece;
const said = errors.length ? [`${errors[0].statusCode} ${errors[0].data?.error?.code}`, calls] : [text, calls];
console.log(JSON.stringify(said));
