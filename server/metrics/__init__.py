"""What Prometheus may ask for: metrics of requests and of the engine's steps."""
