"""Exact event times of what the rest of Antiphon plans and runs: pipelines, links, collectives, training steps."""
