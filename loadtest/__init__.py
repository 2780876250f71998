"""Load test for any OpenAI-compatible server, over HTTP alone: `python -m loadtest run --help`."""
