"""Frozen descriptions (model, placement, layout, sampling) read and written as JSON. Engines obey them."""
