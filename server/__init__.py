"""HTTP and text around the engine: an OpenAI-compatible API. Never imports torch."""
