"""What speculation won: plain steps as a baseline, the measured speed-up, and status."""
