"""The paged KV cache: who owns which page (`pages`), and the tensors behind it (`store`)."""
