"""Training of the model families that Antiphon serves."""
