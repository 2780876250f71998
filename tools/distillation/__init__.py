"""The parts of tools/distill_draft.py."""
