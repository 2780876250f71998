"""Running a transformer over a packed batch: sources, loading, linear layers, attention."""
