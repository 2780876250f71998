"""What one client can do to the others of a server: attacks, and what their victims feel."""
