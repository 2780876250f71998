"""How far to speculate: see `adaptive`."""
