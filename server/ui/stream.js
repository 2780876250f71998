// One streamed answer: an async iterator of traces, with what was measured on the way.
export class Refusal extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answers ${status}.`);
    Object.assign(this, { status, param: error?.param ?? null });
  }
}

export class Stream {
  constructor(path, headers, body) {
    this.path = path;
    this.headers = { ...headers, "Content-Type": "application/json" };
    this.body = { ...body, stream: true, stream_options: { include_usage: true } };
    this.abort = new AbortController();
    this.stats = { tokens: 0, own: 0, drafted: 0, accepted: 0, first: null, rate: null, seconds: null };
    this.stats.speedup = null;
    this.speculation = null;
    this.finish = null;
    this.text = "";
    this.stopped = false;
    this.traced = true;
  }

  stop() {
    this.stopped = true;
    this.abort.abort();
  }

  async *[Symbol.asyncIterator]() {
    this.began = performance.now();
    this.since = null;
    try {
      for await (const payload of this.events()) {
        if (payload.error) throw new Refusal(500, payload.error);
        this.speculation = payload.speculation ?? this.speculation;
        for (const choice of payload.choices) {
          this.finish = choice.finish_reason ?? this.finish;
          const text = choice.delta.content ?? "";
          this.text += text;
          const trace = choice.trace ?? (this.traced || !text ? null : { tokens: [{ text, drafter: null }] });
          if (trace === null) continue;
          this.count(trace, payload.usage);
          yield trace;
        }
        if (payload.usage) this.stats.tokens = payload.usage.completion_tokens;
      }
    } catch (error) {
      if (!this.stopped) throw error;
    } finally {
      this.stats.seconds = (performance.now() - this.began) / 1000;
      this.abort.abort();
    }
  }

  count(trace, usage) {
    const now = performance.now();
    const stats = this.stats;
    const before = stats.tokens;
    stats.tokens = usage?.completion_tokens ?? before + trace.tokens.length;
    if (this.since === null) {
      this.since = now;
      stats.first = (now - this.began) / 1000;
      this.early = stats.tokens;
    } else if (now > this.since) {
      // Without the first step's tokens: they took the time to the first token.
      stats.rate = (1000 * (stats.tokens - this.early)) / (now - this.since);
    }
    if (!this.traced) return;
    // A pass brings one token of the model's own behind those that it confirms.
    stats.own += trace.tokens.filter((token) => token.drafter === null).length;
    stats.drafted += trace.drafted;
    stats.accepted += trace.accepted;
    stats.speedup = trace.speedup;
  }

  ask() {
    return fetch(this.path, {
      method: "POST", headers: this.headers, body: JSON.stringify(this.body), signal: this.abort.signal,
    });
  }

  async *events() {
    let response = await this.ask();
    if (!response.ok) {
      const refusal = await refusalOf(response);
      if (refusal.param !== "speculation.trace") throw refusal;
      // This server does not tell whose guesses its tokens are; it answers all the same.
      this.traced = false;
      delete this.body.speculation.trace;
      this.body.stream_options.continuous_usage_stats = true;
      response = await this.ask();
      if (!response.ok) throw await refusalOf(response);
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read().catch(() => ({ done: true }));
      if (done) throw new Error("The connection broke off before the answer was complete.");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "data: [DONE]") return;
        if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
      }
    }
  }
}

export async function refusalOf(response) {
  const body = await response.json().catch(() => null);
  return new Refusal(response.status, body?.error ?? { message: `The server answers ${response.status}: ${body?.status ?? response.statusText}.` });
}
