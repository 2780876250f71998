"""How far to speculate, and what it bought."""
