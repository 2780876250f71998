"""Does speculation change what is said? Checked on demand and, while idle, online."""
