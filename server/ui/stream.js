// One streamed answer: an async iterator of traces, with what was measured on the way.
export class Stream {
  constructor(path, headers, body) {
    this.path = path;
    this.headers = { ...headers, "Content-Type": "application/json" };
    this.body = { ...body, stream: true, stream_options: { include_usage: true } };
    this.abort = new AbortController();
    this.stats = { tokens: 0, drafted: 0, accepted: 0, first: null, rate: null, seconds: null };
    this.speculation = null;
    this.text = "";
    this.stopped = false;
  }

  stop() {
    this.stopped = true;
    this.abort.abort();
  }

  async *[Symbol.asyncIterator]() {
    const began = performance.now();
    let since = null;
    try {
      for await (const payload of this.events()) {
        if (payload.error) throw new Error(payload.error.message);
        if (payload.usage) this.stats.tokens = payload.usage.completion_tokens;
        this.speculation = payload.speculation ?? this.speculation;
        for (const choice of payload.choices) {
          this.text += choice.delta.content ?? "";
          const now = performance.now();
          const tokens = choice.trace?.tokens.length ?? 0;
          if (tokens && since === null) {
            since = now;
            this.stats.first = (now - began) / 1000;
            this.stats.tokens = tokens;
          } else if (tokens) {
            this.stats.tokens += tokens;
            // Without the first step's tokens: they took the time to the first token.
            this.after = (this.after ?? 0) + tokens;
            this.stats.rate = (1000 * this.after) / (now - since);
          }
          if (!choice.trace) continue;
          this.stats.drafted += choice.trace.drafted;
          this.stats.accepted += choice.trace.accepted;
          yield choice.trace;
        }
      }
    } catch (error) {
      if (!this.stopped) throw error;
    } finally {
      this.stats.seconds = (performance.now() - began) / 1000;
      this.abort.abort();
    }
  }

  async *events() {
    const response = await fetch(this.path, {
      method: "POST", headers: this.headers, body: JSON.stringify(this.body), signal: this.abort.signal,
    });
    if (!response.ok) {
      const body = await response.json().catch(() => null);
      throw new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines)
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
