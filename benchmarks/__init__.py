"""Benchmarks of the engine on real weights; nothing here is a test."""
