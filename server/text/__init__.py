"""Text and token ids: tokenizers, chat templates, incremental decoding, stop strings."""
