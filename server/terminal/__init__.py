"""The chat on a terminal: a client of any server of this kind, over HTTP alone."""
