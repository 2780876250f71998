"""Makes drafters: text that a target writes by itself, and the lessons that turn it into a head."""
