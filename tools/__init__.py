"""Scripts that are no part of the product; run them from the repository."""
